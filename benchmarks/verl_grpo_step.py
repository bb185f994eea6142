"""Time one GRPO step of ours on the shared workload; prints one line of JSON.

    .venv/bin/python benchmarks/verl_grpo_step.py --dtype bf16 --micro-batch 8 --steps 3

The same work as `trl_grpo_step.py`: rollout of 32 samples of exactly 64 tokens, one optimizer step, no reference
model. Weights in bf16 have fp32 masters and moments here; the peer's have not. Every sample of a group has another
reward, so that every row is computed; if one was left out, this fails.

After each step the matrix products of its own forwards and backwards are timed by torch alone (`ceiling.py`).
`training_ceiling_seconds` are those of the update, with prompts shared and micro-batches packed as they were, and
`share_of_ceiling` is what of its speed each part of the step reached. `peak_memory_gb` is this process's alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
import workload
from ceiling import Ceiling, Forwards

import verl
from verl.rollout.base import SamplingParams

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def make_trainer(args: argparse.Namespace) -> verl.Trainer:
    """The trainer, with the peer's settings."""
    actor = verl.Actor.from_pretrained(
        args.model,
        dtype=DTYPES[args.dtype],
        optim={"lr": workload.LEARNING_RATE},
        micro_batch_size=args.micro_batch,
        placement=args.device,
        sampling=SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True),
    )

    def rewards(responses: list[str]) -> list[float]:
        return [workload.reward(text) for text in responses]

    return verl.Trainer(actor, reward_fn=rewards, algorithm="grpo", n=args.samples, log_dir=False)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the steps and return medians over the timed ones, the peak memory, and the settings."""
    torch.set_num_threads(args.threads)
    trainer = make_trainer(args)
    prompts = workload.prompts(trainer.actor.tokenizer, args.prompts)
    logs, rollouts, updates = [], [], []
    with Forwards.recorded() as seen, Ceiling(args.model, DTYPES[args.dtype], args.threads, args.device) as ceiling:
        for number in range(1 + args.steps):
            seen.clear()
            log = trainer.step(prompts)
            if number:  # the first warms up
                logs.append(log)
                rollouts.append(ceiling.seconds(seen.rollout))
                updates.append(ceiling.seconds(seen.update))
    check(args, logs)

    def median(values: Iterable[float]) -> float:
        return round(statistics.median(values), 3)

    def share(products: list[float], key: str) -> float:
        return median(limit / log[key] for limit, log in zip(products, logs, strict=True))

    both = [rollout + update for rollout, update in zip(rollouts, updates, strict=True)]
    return {
        "name": "verl",
        "version": verl.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": args.dtype,
        "micro_batch": args.micro_batch,
        "device": args.device,
        "threads": args.threads,
        "completions": args.prompts * args.samples,
        "new_tokens": args.new_tokens,
        "steps": args.steps,
        "step_seconds": median(log["time/step"] for log in logs),
        "generation_seconds": median(log["time/rollout"] for log in logs),
        "training_seconds": median(log["time/update"] for log in logs),
        "generation_ceiling_seconds": median(rollouts),
        "training_ceiling_seconds": median(updates),
        "share_of_ceiling": {
            "step": share(both, "time/step"),
            "generation": share(rollouts, "time/rollout"),
            "training": share(updates, "time/update"),
        },
        "all_step_seconds": [round(log["time/step"], 3) for log in logs],
        "mean_reward": round(statistics.mean(log["reward"] for log in logs), 3),
        "peak_memory_gb": round(workload.peak_memory_gb(args.device), 3),
    }


def check(args: argparse.Namespace, logs: list[dict[str, float]]) -> None:
    """Raises SystemExit: the steps were not the agreed work, every row of it."""
    if any(log["rollout/tokens"] != args.prompts * args.samples * args.new_tokens for log in logs):
        raise SystemExit("not every completion has its full length: this is not the agreed work")
    if any(log.get("reward/groups_alike") or log.get("update/rows_left_out") for log in logs):
        raise SystemExit(
            "rows were left out of the update, or a group's rewards are alike: this is not the agreed work"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--micro-batch", type=int, default=8)
    workload.add_arguments(parser)
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
