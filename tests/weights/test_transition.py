"""Weights in the generation layout are those of one process, bit for bit, there and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks import job
from tests.weights.rank_transition import CASES

BUCKET = 1 << 15
SCRIPT = Path(__file__).with_name("rank_transition.py")


@pytest.mark.parametrize(
    "cases", ["fast", *(pytest.param(cases, marks=pytest.mark.slow) for cases in CASES if cases != "fast")]
)
def test_weights_are_those_of_one_process_there_and_back(cases: str) -> None:
    ranks = 8 if cases.startswith("8") else 4
    lines = [json.loads(line) for line in job(ranks, SCRIPT, cases).stdout.splitlines() if line.startswith("{")]
    assert lines
    for line in lines:
        for found in line["ranks"]:
            for name in ("there", "whole parts", "back", "freed", "trained", "again"):
                assert found[name] is True, (name, line)
            assert found.get("guarded", True) is True, line
            assert found.get("log_probs", 0.0) < 1e-12, line
            assert found["bytes"][0] == found["bytes"][1], line
            # Beside the weights there are messages of at most two buckets, sent and received.
            held, expected = found["peak"]
            assert expected <= held <= expected + found["kept"] + 4 * BUCKET, line
            # What FSDP cuts by rows and generation by columns is within no part, nor are rows that do not divide.
            apart = "uneven" in line["case"] or ("shard" in line["case"] and not line["case"].endswith("tp=1"))
            assert found["redundant"] == 0 or apart, line
