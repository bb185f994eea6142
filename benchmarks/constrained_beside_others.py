"""What a constrained task costs the task beside it: the other's rollout throughput with the constraint and without.

Three trainers of two tasks are the same but for one task's constraint, which only one of them has (a grammar, and a
check that throws about half of the responses away). In each round all three make one step, in random order. Compared is
the speed of the other task's rollout: with the constraint over without and, as a control that says what the machine
itself makes of it, that of the third trainer over the first. Printed: medians over the rounds with 95 % intervals
(bootstrap). By five pairs of three steps each, the control alone came out between 0.90 and 1.10.

    python benchmarks/constrained_beside_others.py [--rounds 60]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
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


def speed(made: verl.Trainer) -> tuple[float, float]:
    """Tokens per second of the other task's rollout, and the share of rejected responses of the constrained one."""
    record = made.step({"other": PROMPTS, "held": PROMPTS})
    return record["task/other/rollout/tokens_per_s"], record["task/held/rejection_rate"]


def median(ratios: Sequence[float], rng: random.Random) -> dict[str, Any]:
    drawn = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "median": round(statistics.median(ratios), 3),
        "interval": [round(drawn[50], 3), round(drawn[-51], 3)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--hidden", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder), args.hidden)
        trainers = {name: trainer(path, constrained=name == "with") for name in ("without", "control", "with")}
        speeds: dict[str, list[float]] = {name: [] for name in trainers}
        rejected = []
        for number in range(args.rounds + 1):
            for name in rng.sample(list(trainers), len(trainers)):
                found, thrown_away = speed(trainers[name])
                if number:  # the first round is for warming up
                    speeds[name].append(found)
                    rejected += [thrown_away] if name == "with" else []
    ratios = {
        name: [one / plain for one, plain in zip(speeds[name], speeds["without"], strict=True)]
        for name in ("with", "control")
    }
    print(json.dumps({
        "rounds": args.rounds,
        **{name: median(found, rng) for name, found in ratios.items()},
        "rejection_rate": round(statistics.fmean(rejected), 3),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
