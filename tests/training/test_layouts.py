"""A model over the ranks of a layout learns what one process learns, and goes on in any other layout."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.ranks import torchrun
from tests.training.rank_layouts import KINDS

SCRIPT = Path(__file__).with_name("rank_layouts.py")


@pytest.mark.parametrize(
    ("cases", "tolerance"),
    [
        ("fast", 1e-9),
        *(pytest.param(kind, 1e-9, marks=pytest.mark.slow) for kind in (*KINDS, "experts", "others")),
        pytest.param("fp32", 1e-5, marks=pytest.mark.slow),
    ],
)
def test_a_layout_equals_one_process_and_its_state_goes_on_in_another(cases: str, tolerance: float) -> None:
    done = torchrun(4, SCRIPT, cases)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found
    for case in found:
        # In fp32 AdamW turns the rounding of small gradients into steps of its own size.
        exact = ("weights", "predicted", "resumed") if tolerance < 1e-6 else ()
        for name in ("metrics", *exact):
            assert case[name] < tolerance, (name, case)
        assert case["gradient"] > 0.01, case
        assert case["names"], case
        assert case["cuts"] == [dim for dim in case["sizes"] if dim in ("shard", "ep", "tp")], case
        # Pieces, not whole weights; a tied embedding is on two stages.
        pieces = math.prod(size for dim, size in case["sizes"].items() if dim not in ("replicate", "sp", "ep"))
        assert case["held"] < 1.4 / pieces, case
