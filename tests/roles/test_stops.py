"""A rank that stops or dies, in a transfer of weights too, is named within the deadline and 10 s."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import ranks

SCRIPT = Path(__file__).with_name("rank_stops.py")
DEADLINE = 8.0


@pytest.mark.parametrize(
    ("signal", "phase"),
    [
        ("SIGKILL", "transfer"),
        *(
            pytest.param(signal, phase, marks=pytest.mark.slow)
            for signal, phase in [
                ("SIGSTOP", "transfer"),
                ("SIGSTOP", "update"),
                ("SIGSTOP", "generate"),
                ("SIGKILL", "update"),
                ("SIGKILL", "generate"),
            ]
        ),
    ],
)
def test_a_rank_that_stops_or_dies_is_named(make_tiny: Callable[..., Path], signal: str, phase: str) -> None:
    done = ranks.job(2, SCRIPT, make_tiny("llama", torch.float64), signal, phase, check=False)
    (found,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert found["error"][0].startswith("ClusterError") and "rank 1 of 2" in found["error"][0], found
    assert found["seconds"] < (DEADLINE if signal == "SIGSTOP" else 0.0) + 10.0, found
