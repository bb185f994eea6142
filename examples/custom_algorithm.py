"""An algorithm of your own, in your own script: REINFORCE with the group's mean as baseline.

python examples/custom_algorithm.py --model gpt2
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import verl


@verl.register_algorithm("my_reinforce")
class MyReinforce(verl.BaseAlgorithm):
    """`prepare` is the inherited one: advantages are rewards minus the mean of their group."""

    temperature_of_surprise: float = 0.0

    @property
    def loss_columns(self) -> tuple[str, ...]:
        return ("advantages",)

    def compute_loss(self, x: verl.LossInput) -> verl.Loss:
        """Sum over tokens; the weights hold the division by the counts of the whole mini-batch."""
        assert x.log_probs is not None
        surprise = -self.temperature_of_surprise * x.log_probs.detach()
        loss = -(x.weights * (x.columns["advantages"] + surprise) * x.log_probs).sum()
        return verl.Loss(total=loss, metrics={"mean_log_prob": (x.weights * x.log_probs).sum()})


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Train with an algorithm of your own.")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-5)
    args = parser.parse_args(argv)
    actor = verl.Actor.from_pretrained(args.model, optim={"lr": args.lr})
    trainer = verl.Trainer(
        actor,
        reward_fn=lambda texts: [text.count("e") / max(len(text), 1) for text in texts],
        algorithm="my_reinforce",
        n=8,
        sampling=verl.SamplingParams(max_new_tokens=16),
        log_dir=False,
    )
    return [float(trainer.step(["Once upon a time", "In the beginning"])["reward"]) for _ in range(args.steps)]


if __name__ == "__main__":
    main()
