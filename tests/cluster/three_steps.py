"""Three steps of a training script that knows nothing of ranks; started by the tests in one process and in several.

python three_steps.py MODEL OUT [PLACEMENT [TRAIN [MINI_BATCH_SIZE [REWARD_MODEL [ROLLOUT]]]]], all but the first two
as JSON
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import verl


def reward(responses: list[str]) -> list[float]:
    return [sum(map(ord, text)) % 7 / 7 for text in responses]


def run(
    model: str,
    placement: Any = None,
    train: dict[str, Any] | None = None,
    mini_batch_size: int | None = 8,
    reward_model: str | None = None,
    rollout: dict[str, Any] | None = None,
) -> dict[str, Any]:
    torch.set_num_threads(1)
    options: dict[str, Any] = {
        "dtype": "float64",
        "optim": {"lr": 1e-2},
        "mini_batch_size": mini_batch_size,
        "max_tokens_per_micro_batch": 64,
        "placement": placement,
        "train": train,
    }
    sampling = verl.SamplingParams(max_new_tokens=12)
    actor = verl.Actor(model, sampling=sampling, **options, **(rollout or {}))
    critic = verl.Critic(model, **options)
    source = reward if reward_model is None else verl.Reward.from_pretrained(reward_model)
    trainer = verl.Trainer(actor, critic, source, algorithm="ppo", kl_in="reward", n=4, log_dir=False)
    records, samples = learned(trainer, ["Once upon a time", "In the beginning", "A", "The quick brown fox", "And"])
    weights = {s.name: s.tensor.clone() for s in actor.shards()}
    weights |= {f"critic.{s.name}": s.tensor.clone() for s in critic.shards()}
    return {"records": records, "samples": samples, "weights": weights}


def learned(trainer: verl.Trainer, prompts: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Three steps: their records, without what a clock decides, and the samples that each learned from."""
    samples: list[dict[str, Any]] = []
    original = trainer.learn

    def learn(drawn: Mapping[str, verl.Batch]) -> dict[str, Any]:
        names = ("id", "response_tokens", "rollout_log_probs", "reward")
        samples.extend({name: batch[name] for name in names} for batch in drawn.values())
        return original(drawn)

    trainer.learn = learn  # type: ignore[method-assign]
    records = [
        {
            name: value
            for name, value in trainer.step(prompts).items()
            if not name.startswith(("time/", "memory/")) and not name.endswith("_per_s")
        }
        for _ in range(3)
    ]
    return records, samples


def save(results: dict[str, Any], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    torch.save(results["weights"], folder / "weights.pt")
    (folder / "run.json").write_text(json.dumps({name: results[name] for name in ("records", "samples")}))


if __name__ == "__main__":
    save(run(sys.argv[1], *map(json.loads, sys.argv[3:])), Path(sys.argv[2]))
