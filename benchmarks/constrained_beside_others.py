"""What a constrained task costs the task beside it: the other's rollout throughput with the constraint and without.

Two trainers of two tasks, the same but for the constraint of one task (a grammar, and a check that throws about half of
the responses away), step one after the other. Compared are the response tokens per second of the other task's rollouts.

    python benchmarks/constrained_beside_others.py [--pairs 5] [--steps 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from three_tasks import make_model

import verl
from verl.rollout.constrained import ConstrainedEpisode
from verl.rollout.grammar import Grammar

PROMPTS = [f"Write line {number:03d}: " for number in range(8)]


def even(text: str, row: Mapping[str, Any]) -> bool:
    return len(text) > 0 and ord(text[-1]) % 2 == 0


def trainer(path: str, *, constrained: bool) -> verl.Trainer:
    sampling = verl.SamplingParams(max_new_tokens=64, ignore_eos=True)
    episode = ConstrainedEpisode(grammar=Grammar.regex("[a-z ]{8,16}"), accept=even) if constrained else None
    held = {"max_new_tokens": 64, "ignore_eos": False}
    tasks = [
        verl.Task("other", "grpo", {"reward": lambda texts: [float(len(set(t))) for t in texts]}, n=4),
        verl.Task("held", "grpo", {"reward": lambda texts: [float(len(t)) for t in texts]}, n=4, sampling=held,
                  episode=episode),
    ]  # fmt: skip
    return verl.Trainer(verl.Actor(path, sampling=sampling, optim={"lr": 0.0}), tasks=tasks, log_dir=False)


def throughput(made: verl.Trainer, steps: int) -> tuple[float, float]:
    """Tokens per second of the other task's rollouts, and the share of rejected responses of the constrained one."""
    records = [made.step({"other": PROMPTS, "held": PROMPTS}) for _ in range(steps)]
    tokens = sum(record["task/other/rollout/tokens"] for record in records)
    seconds = sum(record["task/other/rollout/tokens"] / record["task/other/rollout/tokens_per_s"] for record in records)
    return tokens / seconds, statistics.fmean(record["task/held/rejection_rate"] for record in records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of each trainer in a pair")
    parser.add_argument("--hidden", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder), args.hidden)
        free, held = (trainer(path, constrained=constrained) for constrained in (False, True))
        for made in (free, held):
            throughput(made, 1)
        ratios, rejected = [], 0.0
        for pair in range(args.pairs):
            made = [free, held] if pair % 2 else [held, free]
            found = {id(one): throughput(one, args.steps) for one in made}
            ratios.append(found[id(held)][0] / found[id(free)][0])
            rejected = found[id(held)][1]
    print(json.dumps({
        "ratios": [round(ratio, 3) for ratio in ratios],
        "median": round(statistics.median(ratios), 3),
        "rejection_rate": round(rejected, 3),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
