"""What a trainer takes: records, and the keywords that are their fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import verl
from tests.trainer.cases import SHORT, low_bytes
from verl.algorithms import algorithm_names, make_algorithm
from verl.config.algorithm_options import AlgorithmKeywords
from verl.errors import ConfigError
from verl.trainer.keywords import TrainerArguments, TrainerKeywords
from verl.trainer.options import (
    BufferOptions,
    CheckpointOptions,
    LimitOptions,
    LoggingOptions,
    PlacementOptions,
)

RECORDS = (PlacementOptions, BufferOptions, CheckpointOptions, LoggingOptions, LimitOptions)
#: Keywords that are no field of a record.
OTHERS = {
    "reward_fn",
    "cost",
    "environment",
    "config_path",
    "dataloader",
    "permute_rewards",
    "skip_zero_advantage_rows",
}


def named(call: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(call).parameters.values()
    assert not [p for p in parameters if p.kind is p.VAR_POSITIONAL]
    assert all("Unpack[" in str(p.annotation) for p in parameters if p.kind is p.VAR_KEYWORD)
    return {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} - {"self"}


def test_type_checkers_know_the_keywords_that_there_are() -> None:
    fields = set[str]().union(*(record.model_fields for record in RECORDS))
    assert TrainerKeywords.__annotations__.keys() - AlgorithmKeywords.__annotations__.keys() == (
        fields - {"placement", "buffer"} | OTHERS
    )
    assert named(verl.Trainer) - {"actor", "critic", "reward"} == (
        TrainerArguments.__annotations__.keys() - TrainerKeywords.__annotations__.keys()
    )


def test_type_checkers_know_the_options_of_all_algorithms() -> None:
    kinds = {type(make_algorithm(name)) for name in algorithm_names()}
    assert AlgorithmKeywords.__annotations__.keys() == set[str]().union(*map(named, kinds))


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
