"""docs/metrics.md has a row for what a run logs."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import verl
from tests.trainer.cases import SHORT, low_bytes

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
NAMES = [
    name
    for line in PAGE.splitlines()
    if line.startswith("| `")
    for name in re.findall(r"`([^`]+)`", line.split("|")[1])
]


def unknown(record: dict[str, object]) -> set[str]:
    own = {re.sub(r"^task/[^/]+/", "", key) for key in record}
    return {key for key in own if not any(fnmatchcase(key, name) for name in NAMES)}


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_of_one_task(tiny: Path, algorithm: str) -> None:
    options = {"kl_in": "loss", "entropy_coeff": 0.01} if algorithm == "grpo" else {}
    critic = verl.Critic(tiny) if algorithm == "ppo" else None
    actor = verl.Actor(tiny, sampling=SHORT)
    trainer = verl.Trainer(actor, critic, reward_fn=low_bytes, algorithm=algorithm, n=4, log_dir=False, **options)
    record = trainer.step(["one", "two"])
    assert not unknown(record)
    assert record["rollout/entropy"] > 0
    assert record["response/length_min"] <= record["response/length"] <= record["response/length_max"]


def test_of_several_tasks_and_groups_that_are_alike(tiny: Path) -> None:
    tasks = [
        verl.Task("a", "grpo", {"reward": lambda texts: [1.0] * len(texts)}, n=2),
        verl.Task("b", "rloo", {"reward": low_bytes}, n=2),
    ]
    trainer = verl.Trainer(verl.Actor(tiny, sampling=SHORT), tasks=tasks, log_dir=False)
    record = trainer.step({"a": ["one", "two"], "b": ["three"]})
    assert not unknown(record)
    assert record["task/a/reward/groups_alike"] == 1.0
