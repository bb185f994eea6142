"""Time one GRPO step of ours on the shared workload; prints one line of JSON.

    .venv/bin/python benchmarks/verl_grpo_step.py --dtype bf16 --micro-batch 8 --steps 3

The same work as `trl_grpo_step.py`: rollout of 32 samples of exactly 64 tokens, one optimizer step, no reference
model. Weights in bf16 have fp32 masters and moments here; the peer's have not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
import workload

import verl
from verl.rollout.base import SamplingParams


def make_trainer(args: argparse.Namespace) -> verl.Trainer:
    """The trainer, with the peer's settings."""
    actor = verl.Actor.from_pretrained(
        args.model,
        dtype={"bf16": "bfloat16", "fp32": "float32"}[args.dtype],
        optim={"lr": workload.LEARNING_RATE},
        micro_batch_size=args.micro_batch,
        placement=args.device,
        sampling=SamplingParams(max_new_tokens=workload.NEW_TOKENS, ignore_eos=True),
    )

    def rewards(responses: list[str]) -> list[float]:
        return [workload.reward(text) for text in responses]

    return verl.Trainer(actor, reward_fn=rewards, algorithm="grpo", n=workload.SAMPLES, log_dir=False)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the steps and return medians over the timed ones, the peak memory, and the settings."""
    torch.set_num_threads(args.threads)
    trainer = make_trainer(args)
    prompts = workload.prompts(trainer.actor.tokenizer)
    logs = [trainer.step(prompts) for _ in range(1 + args.steps)][1:]
    if any(log["rollout/tokens"] != workload.PROMPTS * workload.SAMPLES * workload.NEW_TOKENS for log in logs):
        raise SystemExit("not every completion has its full length: this is not the agreed work")
    return {
        "name": "verl",
        "version": verl.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": args.dtype,
        "micro_batch": args.micro_batch,
        "device": args.device,
        "threads": args.threads,
        "completions": workload.PROMPTS * workload.SAMPLES,
        "new_tokens": workload.NEW_TOKENS,
        "steps": args.steps,
        "step_seconds": round(statistics.median(log["time/step"] for log in logs), 3),
        "generation_seconds": round(statistics.median(log["time/rollout"] for log in logs), 3),
        "training_seconds": round(statistics.median(log["time/update"] for log in logs), 3),
        "all_step_seconds": [round(log["time/step"], 3) for log in logs],
        "mean_reward": round(statistics.mean(log["reward"] for log in logs), 3),
        "peak_memory_gb": round(workload.peak_memory_gb(args.device), 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one that warms up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default=str(workload.MODEL))
    parser.add_argument("--device", default="cpu", help="such as cuda")
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
