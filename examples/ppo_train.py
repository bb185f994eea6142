"""PPO by a trainer, on as many ranks as there are; with `--use_fsdp` each trains a part of the models.

    python examples/ppo_train.py
    torchrun --nproc_per_node=4 examples/ppo_train.py --use_fsdp

The reward counts the letter "e", so a few steps on a laptop show it rise.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import verl


def letter_e(responses: list[str]) -> list[float]:
    """The share of the letter "e" among the letters of each response."""
    return [text.lower().count("e") / max(sum(c.isalpha() for c in text), 1) for text in responses]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="PPO by a trainer.")
    option = parser.add_argument
    option("--use_fsdp", "--use-fsdp", action="store_true", help="weights and optimizer cut over the ranks (FSDP2)")
    option("--model", default="gpt2", help="name or directory of policy and value model (default: %(default)s)")
    option("--steps", type=int, default=10, help="training steps (default: %(default)s)")
    option("--batch_size", "--batch-size", type=int, default=16, help="samples a step (default: %(default)s)")
    option("--lr", type=float, default=1e-5, help="learning rate of both models (default: %(default)s)")
    args = parser.parse_args(argv)
    actor = verl.Actor.from_pretrained(
        args.model, optim={"lr": args.lr}, sampling=verl.SamplingParams(max_new_tokens=16)
    )
    trainer = verl.PPOTrainer(actor, reward_fn=letter_e, strategy="fsdp" if args.use_fsdp else "ddp", log_dir=False)
    record: dict[str, Any] = {}
    for _ in range(args.steps):
        record = trainer.step(["Once upon a time"] * args.batch_size)
    return record


if __name__ == "__main__":
    main()
