"""What a trainer takes: records, and the keywords that are their fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import verl
from tests.trainer.cases import SHORT, low_bytes
from verl.errors import ConfigError
from verl.trainer.options import KEYWORDS, RECORDS, CheckpointOptions, LimitOptions


def named(call: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(call).parameters.values()
    assert not [p for p in parameters if p.kind is p.VAR_POSITIONAL]
    assert all("Unpack[" in str(p.annotation) for p in parameters if p.kind is p.VAR_KEYWORD)
    return {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} - {"self"}


def test_messages_know_the_keywords_that_there_are() -> None:
    models = {"actor", "critic", "reward"}
    assert named(verl.Trainer) - models <= KEYWORDS
    fields = [name for record in RECORDS.values() for name in record.model_fields]
    assert len(fields) == len({*fields}) and {*fields} <= KEYWORDS


@pytest.mark.parametrize("trainer", [verl.Trainer, verl.PPOTrainer, verl.AsyncTrainer, verl.InterleavedTrainer])
def test_a_trainer_has_few_arguments(trainer: type) -> None:
    assert len(named(trainer)) <= 14


def test_a_keyword_stands_for_a_field_of_a_record(tiny: Path, tmp_path: Path) -> None:
    def make(**options: Any) -> verl.Trainer:
        return verl.Trainer(verl.Actor(str(tiny), sampling=SHORT), reward_fn=low_bytes, log_dir=False, **options)

    flat = make(checkpoint_dir=tmp_path, save_every=3, max_resamples=2)
    saving = CheckpointOptions(checkpoint_dir=tmp_path, save_every=3)
    for trainer in (flat, make(checkpoints=saving, limits=LimitOptions(max_resamples=2))):
        assert trainer.checkpoints is not None and trainer.checkpoints.every == 3
        assert trainer.limits == LimitOptions(max_resamples=2)
    assert make(checkpoints={"checkpoint_dir": str(tmp_path)}, save_every=3).checkpoints is not None
    for options, says in (
        (
            {"checkpoints": saving, "save_every": 4},
            "'save_every' is given as a keyword and in checkpoints=: give it once",
        ),
        ({"limits": {"max_resample": 2}}, "limits.max_resample: unknown key; did you mean 'max_resamples'"),
        ({"max_resamples": -1}, "Trainer.max_resamples: must be at least 0, not -1"),
        ({"permute_rewards": "yes"}, "Trainer.permute_rewards: must be true or false, not 'yes'"),
    ):
        with pytest.raises(ConfigError, match=says):
            make(**options)


def test_a_task_takes_its_reward_as_a_trainer_does() -> None:
    for task in (verl.Task(reward=low_bytes), verl.Task(reward_fn=low_bytes), verl.Task(sources={"reward": low_bytes})):
        assert list(task.sources) == ["reward"]
    with pytest.raises(ConfigError, match=r"give one reward: reward=\.\.\. or reward_fn=\.\.\."):
        verl.Task(reward=low_bytes, reward_fn=low_bytes)
