"""A node of your own in the graph of a step: a cost that the policy is trained to keep below a limit.

    python examples/safety_reward_node.py --model gpt2

The class is registered by a name, and the graph takes it by that name: `Trainer(nodes=["safety_reward"])`, or
`RLDataPipeline().add_stage("safety_reward")`. Trainer, algorithm and the other nodes stay as they are. The reward asks
for the letter "e"; the cost is the share of capital letters, so that no model has to be offended.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import verl


@verl.register_node("safety_reward")
class SafetyRewardNode(verl.RewardNode):
    """It writes the column `cost`; which columns it reads, the parameters of `score` say."""

    column = "cost"

    def score(self, responses: list[str], prompts: list[str]) -> list[float]:
        """The share of capital letters in each response, unless its prompt shouts, too."""
        return [
            0.0 if prompt.isupper() else sum(map(str.isupper, text)) / max(len(text), 1)
            for text, prompt in zip(responses, prompts, strict=True)
        ]


def letter_e(responses: list[str]) -> list[float]:
    return [text.lower().count("e") / max(len(text), 1) for text in responses]


def main(argv: Sequence[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description="A reward node of your own.")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-5)
    args = parser.parse_args(argv)
    trainer = verl.Trainer(
        verl.Actor.from_pretrained(args.model, optim={"lr": args.lr}),
        reward_fn=letter_e,
        nodes=["safety_reward"],
        algorithm="safe_rlhf",
        baseline="group",
        cost_limit=0.05,
        n=4,
        sampling=verl.SamplingParams(max_new_tokens=16),
        log_dir=False,
    )
    print(trainer.graph)
    return [trainer.step(["Once upon a time", "In the beginning"]) for _ in range(args.steps)]


if __name__ == "__main__":
    for step, record in enumerate(main()):
        print(f"step {step}  reward {record['reward']:.4f}  cost {record['cost/mean']:.4f}")
