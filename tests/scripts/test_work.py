"""The work of a rollout, a step and a start is as on record."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from scripts import work
from tests import forked


@pytest.mark.slow  # CI runs the command itself, at every commit
def test_no_work_grew_unsaid() -> None:
    command = [sys.executable, str(work.ROOT / "scripts" / "work.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


#: What the meter is to see: a product and its backward in another thread, one of two copies, two reads, a process.
KNOWN = """
import json, subprocess, sys, threading
from collections import Counter
import torch
from scripts.work import Meter
counts, meter = Counter(), Meter()
x, w = torch.ones(4, 8, requires_grad=True), torch.ones(8, 16)
x.detach().clone()
with meter.counting(counts):
    thread = threading.Thread(target=lambda: (x @ w).sum().backward())
    thread.start()
    thread.join()
    w.clone()
    w.tolist()
    w[0, 0].item()
    subprocess.run([sys.executable, "-c", ""])
w.tolist()
print(json.dumps(counts))
"""


def test_all_threads_are_counted_and_no_more_than_was_asked() -> None:
    done = forked.run([sys.executable, "-c", KNOWN], timeout=200, check=True)
    counts = json.loads(done.stdout)
    product = 2 * 4 * 8 * 16
    assert (counts["products"], counts["flops"]) == (2, 2 * product)  # the weight wants no gradient
    assert (counts["copied"], counts["waits"], counts["processes"]) == (8 * 16 * 4, 2, 1)
    assert counts["operators"] > 4


def test_the_record_has_every_count() -> None:
    record = json.loads(work.RECORD.read_text())
    assert set(record) == {f"{name}, {way}" for name in ("rollout", "step") for way in ("kernels", "torch")} | {"start"}
    kinds = {"operators", "products", "megaflops", "kernels", "copied", "waits", "functions", "modules", "processes"}
    assert {name for numbers in record.values() for name in numbers} == kinds


@pytest.mark.parametrize(
    ("old", "new", "grew", "fell"),
    [
        (1000, 1050, False, False),
        (1000, 1051, True, False),
        (1000, 949, False, True),
        (1, 2, True, False),
        (0, 1, True, False),
        (1, 0, False, True),
    ],
)
def test_five_in_a_hundred_are_growth(old: int, new: int, grew: bool, fell: bool) -> None:
    lines = work.differences({"step": {"waits": old}}, {"step": {"waits": new}})
    assert [len(each) for each in lines] == [grew, fell]
    assert not grew or lines[0][0].startswith(f"step: waits {old:,} -> {new:,}")


def test_work_that_is_not_counted_here_is_no_difference() -> None:
    """The compiled kernels, where there is no compiler; and a kind that the record does not have."""
    record = {"step, kernels": {"waits": 50}, "step, torch": {"waits": 50}}
    assert work.differences(record, {"step, torch": {"waits": 50}}) == ([], [])
    assert work.differences(record, {"start": {"waits": 50}})[0] == ["start: waits 0 -> 50"]
