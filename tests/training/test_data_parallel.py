"""The number of ranks never changes a gradient (fp64), nor do micro-batches or the order of rows at any of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.algorithms.support import OFFLINE, ONLINE
from tests.ranks import torchrun
from tests.training.rank_layouts import LAYOUTS

SCRIPT = Path(__file__).with_name("rank_gradients.py")


def test_ranks_micro_batches_and_order_never_change_a_gradient() -> None:
    done = torchrun(3, SCRIPT)
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {case["case"].split()[0] for case in cases} == {*ONLINE, *OFFLINE}
    for case in cases:
        assert case["gradient"] < 1e-10, case
        assert case["metrics"] < 1e-10, case
        assert case["names"], case


def test_layouts_equal_one_process_and_resume_in_another_one() -> None:
    done = torchrun(4, SCRIPT.with_name("rank_layouts.py"))
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(cases) == len(LAYOUTS)
    for found, (layout, _) in zip(cases, LAYOUTS, strict=True):
        for name in ("weights", "metrics", "log_probs", "resumed"):
            assert found[name] < 1e-10, (layout, name)
        assert found["names"]
        assert found["cuts"] == ([[["shard", 0]]] if layout.shard > 1 else [[]])
        assert found["held"] == pytest.approx(1 / layout.shard, abs=0.01)  # pieces, not whole weights
