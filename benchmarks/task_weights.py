"""Weights that follow the learning, against fixed ones: steps until the tasks that still learn reach a reward.

The model of `learning.py` is trained on three tasks at once: to name a number, which it can from the beginning, the
largest of three, and, behind a mark, the smallest. With fixed weights each has a third of the prompts; with
`DynamicTaskWeightScheduler` the first one's share falls to the floor once it has stopped gaining.

    python benchmarks/task_weights.py [--seeds 0 1 2] [--reward 0.9] [--steps 800]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import learning
import torch

import verl
from verl.data import get_dataloader
from verl.utils import DynamicTaskWeightScheduler

MARK = "<unknown> "
LEARNED = ("largest", "smallest")


def score(choose: Callable[[list[int]], list[int]]) -> Callable[..., list[float]]:
    """1 for a response that is one of the numbers chosen of the prompt's."""

    def reward(responses: list[str], prompts: list[str]) -> list[float]:
        asked = [[int(word) for word in prompt.split() if word.isdigit()] for prompt in prompts]
        chosen = [[str(number) for number in choose(numbers)] for numbers in asked]
        return [float(r.strip() in good) for r, good in zip(responses, chosen, strict=True)]

    return reward


REWARDS = {
    "number": score(lambda numbers: list(learning.NUMBERS)),
    "largest": score(lambda numbers: [max(numbers)]),
    "smallest": score(lambda numbers: [min(numbers)]),
}


def run(base: str, seed: int, wanted: float, most: int, *, adapts: bool) -> tuple[int, float]:
    """Steps until the mean reward of both tasks over ten steps is `wanted` (at most `most`), and the share that the
    first task has then."""
    torch.manual_seed(seed)
    sampling = verl.SamplingParams(max_new_tokens=2)
    actor = verl.Actor.from_pretrained(base, optim={"lr": 1e-3}, sampling=sampling, seed=seed, dtype="float32")
    tasks = [verl.Task(name, "grpo", {"reward": reward}) for name, reward in REWARDS.items()]
    trainer = verl.Trainer(actor, tasks=tasks, log_dir=False)
    if adapts:
        trainer.set_task_scheduler(
            DynamicTaskWeightScheduler(dict.fromkeys(REWARDS, 1.0), patience=60, min_weight=0.05)
        )
    rng = random.Random(seed)
    data = {
        name: [(MARK if name == "smallest" else "") + learning.prompt(n) for n in rng.sample(learning.TRAINED, 1000)]
        for name in REWARDS
    }
    trainer.mixture.adopt(loader := get_dataloader(data, dict.fromkeys(REWARDS, 1.0), batch_size=24, seed=seed))
    latest: dict[str, list[float]] = {name: [] for name in LEARNED}
    record: dict[str, Any] = {}
    for step in range(1, most + 1):
        record = trainer.step(next(loader))
        for name, values in latest.items():
            values.append(record.get(f"task/{name}/reward/mean", values[-1] if values else 0.0))
        if all(statistics.fmean(values[-10:]) >= wanted for values in latest.values()) and step >= 10:
            break
    return step, record["task/number/share"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--reward", type=float, default=0.9)
    parser.add_argument("--steps", type=int, default=800, help="the most")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[int]] = {"fixed": [], "following": []}
    shares = []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        learning.make_base(base)
        for seed in args.seeds:
            for name, steps in found.items():
                taken, share = run(str(base), seed, args.reward, args.steps, adapts=name == "following")
                steps.append(taken)
            shares.append(round(share, 3))
    print(json.dumps({
        "steps_to_reward": found,
        "medians": {name: statistics.median(steps) for name, steps in found.items()},
        "share_of_what_has_converged": shares,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
