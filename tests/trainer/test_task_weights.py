"""Weights that follow how far tasks have come."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import verl
from tests.properties import examples
from tests.trainer.test_tasks import loader, tasks, trainer_of
from verl.errors import CheckpointError, ConfigError
from verl.trainer.tasks import Mixture
from verl.utils import DynamicTaskWeightScheduler

NAMES = ("a", "b", "c")
values = st.lists(st.dictionaries(st.sampled_from(NAMES), st.floats(-1e3, 1e3) | st.just(float("nan"))), max_size=60)


def metrics(**rewards: float) -> dict[str, dict[str, float]]:
    return {name: {"reward/mean": value} for name, value in rewards.items()}


@examples(60)
@given(values, st.integers(1, 40), st.floats(0, 1 / 3), st.lists(st.floats(0.01, 5), min_size=3, max_size=3))
def test_weights_sum_to_one_and_keep_the_floor_and_resume(
    steps: list[dict[str, float]], patience: int, floor: float, initial: list[float]
) -> None:
    def make() -> DynamicTaskWeightScheduler:
        weights = dict(zip(NAMES, initial, strict=True))
        return DynamicTaskWeightScheduler(weights, patience=patience, min_weight=floor)

    scheduler, cut = make(), make()
    for step, found in enumerate(steps, 1):
        weights = scheduler.update(step, metrics(**found))
        assert sum(weights.values()) == pytest.approx(1, abs=1e-9)
        assert min(weights.values()) >= floor - 1e-9
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(cut.state_dict())))
        cut = resumed
        assert cut.update(step, metrics(**found)) == weights


def run(curves: dict[str, Any], steps: int, patience: int = 50, **options: Any) -> DynamicTaskWeightScheduler:
    rng = random.Random(0)
    scheduler = DynamicTaskWeightScheduler(dict.fromkeys(curves, 1.0), patience=patience, **options)
    for step in range(1, steps + 1):
        scheduler.update(step, metrics(**{name: curve(step) + rng.gauss(0, 0.05) for name, curve in curves.items()}))
    return scheduler


def test_a_task_that_has_converged_gives_its_weight_to_those_that_learn() -> None:
    curves = {
        "done": lambda step: min(0.9, 0.1 * step),
        "slow": lambda step: step / 1000,
        "other": lambda step: step / 800,
    }
    weights = run(curves, 300, min_weight=0.1).weights
    assert weights["done"] == pytest.approx(0.1, abs=1e-3)
    assert weights["slow"] == pytest.approx(0.45, abs=1e-3) and weights["other"] == pytest.approx(0.45, abs=1e-3)


def test_a_task_that_falls_back_gets_weight_again() -> None:
    curves = {"falls": lambda step: 0.9 if step < 150 else 0.3, "slow": lambda step: step / 1000}
    assert run(curves, 149).weights["falls"] < 0.15
    assert run(curves, 250).weights["falls"] > 0.45


def test_with_all_converged_the_weights_are_the_first_ones_again() -> None:
    curves = {"a": lambda step: min(0.9, 0.1 * step), "b": lambda step: min(0.9, step / 200)}
    assert run(curves, 190).weights["a"] < 0.2
    assert run(curves, 600).weights == pytest.approx({"a": 0.5, "b": 0.5}, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"initial_weights": {}}, "must have at least 1 item"),
        ({"initial_weights": {"a": -1.0}}, "initial_weights.a: must be at least 0"),
        ({"initial_weights": {"a": 0.0}}, "all 0"),
        ({"initial_weights": {"a": 1, "b": 1}, "min_weight": 0.6}, "between 0 and 1"),
        ({"initial_weights": {"a": 1}, "patience": 0}, "patience: must be at least 1"),
    ],
)
def test_what_it_cannot_take_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DynamicTaskWeightScheduler(**options)


def test_a_trainer_follows_it_and_resumes_with_it(tiny: Path, tmp_path: Path) -> None:
    def make() -> verl.Trainer:
        trainer = trainer_of(tiny, tasks(), checkpoint_dir=tmp_path, save_every=1)
        initial = {"low": 1.0, "high": 3.0}
        trainer.set_task_scheduler(DynamicTaskWeightScheduler(initial, patience=2, min_weight=0.1))
        return trainer

    trainer, mixed = make(), loader(8, low=1.0, high=1.0)
    assert trainer.mixture.shares == pytest.approx({"low": 0.25, "high": 0.75})
    trainer.fit(mixed, 4)
    assert mixed.shares == trainer.mixture.shares and sum(mixed.shares.values()) == pytest.approx(1)
    resumed = make()
    assert resumed.resume() == 4
    assert resumed.mixture.shares == trainer.mixture.shares
    with pytest.raises(ConfigError, match="weighs task 'hihg': did you mean 'high'"):
        trainer.set_task_scheduler(DynamicTaskWeightScheduler({"low": 1.0, "hihg": 1.0}))
    other = DynamicTaskWeightScheduler({"low": 1.0, "high": 1.0}, patience=90)
    with pytest.raises(CheckpointError, match="another patience"):
        other.load_state_dict(trainer.mixture.state_dict())


@examples(60)
@given(
    st.dictionaries(st.sampled_from("abcde"), st.floats(0.05, 5), min_size=3),
    st.integers(1, 2),
    st.floats(0, 0.2),
    st.lists(st.floats(-1e3, 1e3), max_size=30),
)
def test_shares_beside_tasks_that_are_not_named_keep_the_floor(
    base: dict[str, float], unnamed: int, floor: float, rewards: list[float]
) -> None:
    named = sorted(base)[unnamed:]
    mixture = Mixture({name: SimpleNamespace(share=share) for name, share in base.items()})  # type: ignore[misc]
    total = sum(base.values())
    left = sum(base[name] for name in named) / total
    scheduler = DynamicTaskWeightScheduler(dict.fromkeys(named, 1.0), patience=4, min_weight=floor)
    mixture.scheduler = scheduler
    if left < floor * len(named) * (1 - 1e-9):
        with pytest.raises(ConfigError, match=r"less than min_weight=.* for each"):
            mixture.share_out()
        return
    mixture.share_out()
    for step, reward in enumerate(rewards):
        scheduler.update(step, metrics(**{named[step % len(named)]: reward}))
        mixture.share_out()
        assert sum(mixture.shares.values()) == pytest.approx(1)
        assert all(mixture.shares[name] >= floor - 1e-9 for name in named)
        assert all(mixture.shares[name] == pytest.approx(base[name] / total) for name in base if name not in named)


def test_a_metric_that_no_task_has_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = DynamicTaskWeightScheduler({"a": 1.0, "b": 1.0}, metric_key="accuracy")
    for step in range(5):
        scheduler.update(step, metrics(a=1.0, b=2.0))
    (record,) = caplog.records
    assert record.message.startswith("the scheduler has not seen 'accuracy' of task 'a': known: ")
    scheduler = DynamicTaskWeightScheduler({"a": 1.0, "b": 1.0}, metric_key="reward_scor")
    with pytest.raises(ConfigError, match="of task 'a', 'reward_scor': did you mean 'reward_score'"):
        scheduler.update(0, metrics(a=1.0, b=2.0))
