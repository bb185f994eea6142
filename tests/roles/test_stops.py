"""A rank that stops or dies in any phase is named within the deadline and 10 s."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import ranks
from tests.roles.rank_stops import DEADLINE, PHASES

SCRIPT = Path(__file__).with_name("rank_stops.py")
CASES = [(signal, phase) for signal in ("SIGSTOP", "SIGKILL") for phase in PHASES]
#: Killed while ranks meet, it is missed at the end of the deadline: nothing connects them yet.
MISSED = ("SIGKILL", "start")


def check(text: str, signal: str, phase: str, *, is_ray: bool) -> None:
    (ended,) = (json.loads(line) for line in text.splitlines() if line.startswith("{"))
    first = ended["error"][0]
    assert first.startswith("ClusterError"), ended
    named = re.findall(r"rank (\d+)(?: of 2)?", first)
    assert "1" in named and (named[-1] == "1" or "0" not in named), ended
    waits = signal == "SIGSTOP" or ((signal, phase) == MISSED and not is_ray)
    assert ended["seconds"] < (DEADLINE if waits else 0.0) + 10.0, ended


@pytest.mark.parametrize(
    ("signal", "phase"),
    [case if case == ("SIGKILL", "transfer") else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_a_rank_that_stops_or_dies_is_named(
    make_tiny: Callable[..., Path], tmp_path: Path, signal: str, phase: str
) -> None:
    done = ranks.job(2, SCRIPT, make_tiny("llama", torch.float64), signal, phase, tmp_path, check=False)
    check(done.stdout, signal, phase, is_ray=False)


@pytest.mark.slow
@pytest.mark.parametrize(("signal", "phase"), CASES)
def test_a_rank_on_ray_that_stops_or_dies_is_named(
    make_tiny: Callable[..., Path], tmp_path: Path, signal: str, phase: str
) -> None:
    pytest.importorskip("ray")
    done = ranks.alone(SCRIPT, make_tiny("llama", torch.float64), signal, phase, tmp_path, check=False)
    check(done.stdout, signal, phase, is_ray=True)
