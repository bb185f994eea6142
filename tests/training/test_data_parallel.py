"""The number of ranks never changes a gradient (fp64), nor do micro-batches or the order of rows at any of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.algorithms.support import OFFLINE, ONLINE
from tests.ranks import job

SCRIPT = Path(__file__).with_name("rank_gradients.py")


@pytest.mark.parametrize(
    "names", [["ppo", "kto"], pytest.param([*ONLINE, *OFFLINE], marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_ranks_micro_batches_and_order_never_change_a_gradient(names: list[str]) -> None:
    done = job(3, SCRIPT, *names)
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {case["case"].split()[0] for case in cases} == set(names)
    for case in cases:
        assert case["gradient"] < 1e-10, case
        assert case["metrics"] < 1e-10, case
        assert case["names"], case
