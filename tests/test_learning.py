"""One algorithm of each family learns its objective on a real model, and does not with learning rate 0.

All of them, in three seeds and longer: `benchmarks/learning.py`, whose code this is.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow  # a model is pre-trained for 20 s; tests/algorithms/test_learning.py is quick
BENCHMARK = Path(__file__).resolve().parent.parent / "benchmarks" / "learning.py"


@pytest.fixture(scope="module")
def learning() -> ModuleType:
    spec = importlib.util.spec_from_file_location("learning_benchmark", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def base(learning: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("learning") / "base"
    learning.make_base(path)
    return path


@pytest.mark.parametrize("name", ["rloo", "ppo", "dpo", "kto", "sft", "reward_model", "constrained_decoding"])
def test_one_of_each_family_learns(
    learning: ModuleType, base: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(learning.SETTINGS, name, learning.Settings(steps=20))
    curve, control = learning.run(name, 0, "run", base), learning.run(name, 0, learning.CONTROL, base)
    verdict = learning.judge(curve, control)
    assert verdict.learned, verdict
    # The control's objective moves by the sampling of its answers alone.
    assert abs(learning.distance(control.last, control.first)) < 3.5


def test_the_reward_is_told_and_permuted_rewards_tell_nothing(learning: ModuleType, base: Path) -> None:
    curve, control, permuted = (
        learning.run("reward_conditioned", 0, which, base) for which in ("run", learning.CONTROL, learning.PERMUTED)
    )
    verdict = learning.judge(curve, control)
    assert verdict.learned and verdict.last > verdict.first + 0.15, verdict
    assert abs(learning.distance(permuted.last, permuted.first)) < 3.5


def test_a_constraint_is_kept_and_would_not_be_by_itself(learning: ModuleType, base: Path) -> None:
    curves = [learning.run("safe_rlhf", 0, control, base) for control in learning.runs_of("safe_rlhf")]
    verdict = learning.judge(*curves)
    assert verdict.learned, verdict
