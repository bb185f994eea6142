"""Losses and gradient norms are TRL's: one row a trainer and loss, run by TRL in its own environment and by us here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.conftest import byte_tokenizer, config_of, save_tiny
from tests.trl.peer_numbers import CASES

ROOT = Path(__file__).parents[2]
PEER = ROOT / ".bench" / "trl" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.peer,
    pytest.mark.skipif(not PEER.exists(), reason="needs TRL: benchmarks/peer_env.sh trl"),
]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Package -> case -> [[loss, gradient norm] of each step]."""
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
    theirs, ours = (numbers[package][case] for package in ("trl", "verl.trl"))
    assert not isinstance(theirs, str), theirs
    assert not isinstance(ours, str), ours
    if CASES[case][2].get("num_iterations") == 2:  # our log has the mean over the updates of a rollout
        pairs = zip(theirs[::2], theirs[1::2], strict=True)
        theirs = [[(a + b) / 2 for a, b in zip(one, other, strict=True)] for one, other in pairs]
    torch.testing.assert_close(torch.tensor(ours).double(), torch.tensor(theirs).double(), rtol=1e-4, atol=1e-4)
