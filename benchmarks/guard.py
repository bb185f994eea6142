"""A guard on live runs: it leaves healthy ones alone, and takes one whose reward breaks back to where it was well.

The model of `learning.py` is trained to name the largest of three numbers, by three algorithms, with a `SafetyGuard` on
the reward. A fourth run is sabotaged: for some steps its reward praises every other answer instead. Printed: each
alert, and the share of right answers in every ten steps, which the trainer does not see.

    python benchmarks/guard.py [--steps 150] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import learning
import torch

import verl
from verl.data.loader import PromptLoader
from verl.data.prompts import load_prompts
from verl.trainer import Alert, SafetyGuard

PROMPTS, SAMPLES = 16, 8
HEALTHY = ("grpo", "rloo", "reinforce_plus_plus")


class Reward:
    """1 for the largest number; in the steps `broken`, counted over all that were made, 1 for any other."""

    def __init__(self, broken: range) -> None:
        self.broken = broken
        self.right: list[float] = []

    def __call__(self, responses: list[str], prompts: list[str]) -> list[float]:
        found = learning.right(responses, prompts)
        is_broken = len(self.right) // (PROMPTS * SAMPLES) in self.broken
        self.right += found
        return [1 - value for value in found] if is_broken else found

    def shares(self) -> list[float]:
        """Of right answers, in ten steps each."""
        size = 10 * PROMPTS * SAMPLES
        return [round(statistics.fmean(self.right[at : at + size]), 2) for at in range(0, len(self.right), size)]


def run(base: Path, algorithm: str, steps: int, seed: int, folder: Path, broken: range = range(0)) -> dict[str, Any]:
    torch.manual_seed(seed)
    sampling = verl.SamplingParams(max_new_tokens=2)
    actor = verl.Actor.from_pretrained(str(base), optim={"lr": 3e-4}, sampling=sampling, seed=seed, dtype="float32")
    reward, alerts = Reward(broken), list[Alert]()
    trainer = verl.Trainer(
        actor,
        reward_fn=reward,
        algorithm=algorithm,
        n=SAMPLES,
        log_dir=False,
        checkpoint_dir=folder,
        save_every=5,
        keep_checkpoints=10,
    )
    trainer.add_guard(SafetyGuard(["reward"], rollback_steps=20, on_alert=alerts.append))
    rng = random.Random(seed)
    prompts = load_prompts([learning.prompt(numbers) for numbers in rng.sample(learning.TRAINED, 2000)])
    trainer.fit(PromptLoader(prompts, batch_size=PROMPTS, seed=seed), steps=steps)
    return {
        "algorithm": algorithm,
        "alerts": [{"step": alert.step, "back_to": alert.back_to} for alert in alerts],
        "right": reward.shares(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"
        learning.make_base(base)
        for algorithm in HEALTHY:
            print(json.dumps(run(base, algorithm, args.steps, args.seed, Path(name) / algorithm)))
        broken = range(args.steps // 2, args.steps // 2 + 12)
        sabotaged = run(base, "grpo", args.steps, args.seed, Path(name) / "sabotaged", broken)
        print(json.dumps({"broken": [broken.start, broken.stop - 1]} | sabotaged))


if __name__ == "__main__":
    main()
