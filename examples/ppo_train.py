"""PPO by a trainer, on as many ranks as there are; with `--use_fsdp` each trains a part of the models.

    python examples/ppo_train.py
    torchrun --nproc_per_node=4 examples/ppo_train.py --use_fsdp
    torchrun --nproc_per_node=4 examples/ppo_train.py --use_fsdp --tensor_parallel_size 2 --checkpoint_dir saved
    python examples/ppo_train.py --use_fsdp --placement cpu:0-3

With `--checkpoint_dir` the same command goes on after an interruption, also at another number of ranks.
The reward counts the letter "e", so a few steps on a laptop show it rise.
"""

from __future__ import annotations

import argparse
import itertools
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
    option("--tensor_parallel_size", type=int, default=1, help="ranks that share each layer (default: %(default)s)")
    option("--placement", help="devices of a Ray cluster, such as cpu:0-3 (default: this process, or torchrun's ranks)")
    option("--checkpoint_dir", help="save there after each step, and go on from what is there")
    args = parser.parse_args(argv)
    actor = verl.Actor.from_pretrained(
        args.model,
        optim={"lr": args.lr},
        train={"tensor_parallel_size": args.tensor_parallel_size},
        sampling=verl.SamplingParams(max_new_tokens=16),
    )
    trainer = verl.PPOTrainer(
        actor,
        reward_fn=letter_e,
        strategy="fsdp" if args.use_fsdp else "ddp",
        placement=args.placement,
        checkpoint_dir=args.checkpoint_dir,
        save_every=1 if args.checkpoint_dir else None,
        log_dir=False,
    )
    if args.checkpoint_dir:
        trainer.resume()
    prompts = ["Once upon a time"] * args.batch_size
    return trainer.fit(itertools.repeat(prompts), max(0, args.steps - trainer.steps))


if __name__ == "__main__":
    main()
