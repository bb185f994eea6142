"""Losses, gradient norms and what else is logged are TRL's: one row a trainer and loss, run by TRL in its own
environment and by us here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.conftest import byte_tokenizer, config_of, save_tiny
from tests.trl.peer_numbers import CASES

ROOT = Path(__file__).parents[2]
PEER = ROOT / ".bench" / "trl" / "bin" / "python"
#: Of these no number is compared.
TIMES = {"step_time"}
#: Further cases of one micro-batch a step.
AS_A_WHOLE = ("dpo aot", "kto whole", "grpo bnpo", "grpo entropy")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3200),  # one fixture trains all cases twice
    pytest.mark.peer,
    pytest.mark.skipif(not PEER.exists(), reason="needs TRL: benchmarks/peer_env.sh trl"),
]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Package -> case -> [{entry: number} of each step]."""
    models = tmp_path_factory.mktemp("models")
    save_tiny(models / "lm")
    torch.manual_seed(1)
    config = config_of("llama")
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(models / "score")
    byte_tokenizer().save_pretrained(models / "score")
    results = {}
    for package, python, path in (("trl", PEER, ""), ("verl.trl", sys.executable, str(ROOT))):
        env = {**os.environ, "PYTHONPATH": path}
        command = [python, Path(__file__).with_name("peer_numbers.py"), package, models]
        done = subprocess.run(command, env=env, cwd=models, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stderr[-2000:]
        results[package] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradient_norms_are_those_of_trl(case: str, numbers: dict[str, dict[str, Any]]) -> None:
    theirs, ours = both(case, numbers)
    for name in ("loss", "grad_norm"):
        assert_close([step[name] for step in ours], [step[name] for step in theirs])


@pytest.mark.parametrize("case", [case for case in CASES if case in AS_A_WHOLE or case.endswith(" one")])
def test_all_that_is_logged_is_as_with_trl(case: str, numbers: dict[str, dict[str, Any]]) -> None:
    theirs, ours = both(case, numbers)
    for there, here in zip(theirs, ours, strict=True):
        # Without an end that is the padding token, which transformers does not score.
        names = sorted(there.keys() - TIMES - ({"num_tokens"} if case == "reward one" else set()))
        assert not {*names} - here.keys()
        print({name: (there[name], here[name]) for name in names if abs(there[name] - here[name]) > 1e-4})
        assert_close([here[name] for name in names], [there[name] for name in names])


def both(case: str, numbers: dict[str, dict[str, Any]]) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Entries of each step, TRL's and ours: of several updates of a rollout, ours has what is told of all of them."""
    theirs, ours = (numbers[package][case] for package in ("trl", "verl.trl"))
    assert not isinstance(theirs, str), theirs
    assert not isinstance(ours, str), ours
    if CASES[case][2].get("num_iterations") == 2:
        theirs = [together(*pair) for pair in zip(theirs[::2], theirs[1::2], strict=True)]
    return theirs, ours


def together(*steps: dict[str, float]) -> dict[str, float]:
    """One entry for several: means, but for extremes, and numbers so far."""
    ways = {"clip_ratio/low_min": min, "clip_ratio/high_max": max, "num_tokens": max, "step": max, "epoch": max}
    values = {name: [step[name] for step in steps if name in step] for name in steps[0]}
    return {name: ways.get(name, fmean)(numbers) for name, numbers in values.items()}


def assert_close(ours: list[float], theirs: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(ours).double(), torch.tensor(theirs).double(), rtol=1e-4, atol=1e-4)
