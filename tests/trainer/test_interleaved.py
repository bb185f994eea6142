"""Tasks that do not wait for each other: what they learn from, how old it is, and how a run goes on."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import verl
from tests.trainer.cases import SHORT, low_bytes
from tests.trainer.test_tasks import loader
from verl.errors import ConfigError
from verl.trainer.task import Task


def made(reward: Any = low_bytes, **options: Any) -> list[Task]:
    algorithm = verl.trainer.task.make_algorithm("grpo", rollout_is="token")
    low = Task("low", algorithm, {"reward": reward}, n=4, sampling=SHORT, **options)
    high = verl.trainer.task.make_algorithm("grpo", rollout_is="token")
    return [low, Task("high", high, {"reward": low_bytes}, n=4, sampling=SHORT)]


def trainer_of(path: Path, tasks: list[Task], lr: float = 1e-2, **options: Any) -> verl.InterleavedTrainer:
    actor = verl.Actor(str(path), optim={"lr": lr}, sampling=SHORT)
    return verl.InterleavedTrainer(actor, tasks=tasks, **{"log_dir": False, "max_staleness": 1, **options})


@pytest.mark.slow
def test_a_task_is_trained_while_anothers_reward_is_waited_for(tiny: Path) -> None:
    """The reward of one task is held back until the other has been updated, at most as often as staleness allows."""
    trained = threading.Event()
    records: list[dict[str, Any]] = []

    async def waits(texts: list[str]) -> list[float]:
        assert await asyncio.to_thread(trained.wait, 60), "the other task was not trained meanwhile"
        return low_bytes(texts)

    trainer = trainer_of(tiny, made(verl.Reward(waits, timeout=120)))
    trainer.on_log_hook(lambda step, record: (records.append(record), trained.set()))
    trainer.fit(loader(), 6)
    assert "task/low/samples" not in records[0] and records[0]["task/high/samples"] > 0
    late = next(record for record in records if "task/low/samples" in record)
    assert late["task/low/rollout/staleness/max"] == 1 and late["task/low/reward/abstained"] == 0
    assert max(record["rollout/staleness/max"] for record in records) == 1
    assert trainer.actor.policy_version == 6


@pytest.mark.slow
def test_interleaved_tasks_learn_and_a_control_does_not(tiny: Path) -> None:
    finals = {}
    for lr in (1e-2, 0.0):
        records: list[dict[str, Any]] = []
        trainer = trainer_of(tiny, made(), lr)
        trainer.on_log_hook(lambda step, record, records=records: records.append(record))
        trainer.fit(loader(8), 60)
        for name in ("low", "high"):
            rewards = [record[f"task/{name}/reward"] for record in records if f"task/{name}/reward" in record]
            finals[name, lr] = sum(rewards[-5:]) / 5 - sum(rewards[:3]) / 3
    assert finals["low", 1e-2] > 0.2 and finals["high", 1e-2] > 0.2
    assert abs(finals["low", 0.0]) < 0.15 and abs(finals["high", 0.0]) < 0.15


@pytest.mark.slow
def test_what_was_on_its_way_is_drawn_again_after_a_stop(tiny: Path, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def noting(texts: list[str], prompts: list[str]) -> list[float]:
        seen.append(prompts)
        return low_bytes(texts)

    def run(steps: int) -> verl.InterleavedTrainer:
        trainer = trainer_of(tiny, made(noting), checkpoint_dir=tmp_path, save_every=1)
        trainer.resume()
        trainer.fit(loader(), steps)
        return trainer

    first = run(3)
    place = first.position
    assert place is not None
    again = run(0)
    assert again.position == place and again.steps == 3
    second = run(3)
    assert second.steps == 6 and second.position != place


def test_what_it_cannot_do_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="is of several tasks"):
        trainer_of(tiny, made()[:1])
    with pytest.raises(ConfigError, match="max_staleness: must be at least 1"):
        trainer_of(tiny, made(), max_staleness=0)
    algorithm = verl.trainer.task.make_algorithm("grpo", rollout_is=None)
    uncorrected = [Task(name, algorithm, {"reward": low_bytes}, n=4) for name in ("low", "high")]
    with pytest.raises(ConfigError, match="does not correct for samples of an older policy"):
        trainer_of(tiny, uncorrected)
    trainer = trainer_of(tiny, made())
    with pytest.raises(ConfigError, match="draws from a TaskLoader"):
        trainer.fit([["prompt"]], 1)
    with pytest.raises(ConfigError, match="call fit"):
        trainer.step(["prompt"])
