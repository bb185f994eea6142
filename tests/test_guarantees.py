"""Every promise of `docs/guarantees.md` has a test, and a quick one wherever it can be tried in seconds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guarantees.md"
#: Beginnings of promises that only slow tests show, and why.
ONLY_SLOW = {
    "A checkpoint of two ranks goes on with one process": "three jobs from cold",
    "One placement over two nodes": "two clusters in network namespaces",
    "The same where several ranks write it": "ranks are killed in saves",
    "A rank on Ray that hangs is named": "deadlines of Ray",
    "An error on one rank ends the job": "jobs of ranks and of Ray",
    "The same when a node of a Ray cluster is lost": "a cluster of two nodes",
    "Ctrl-C and SIGTERM also end a run whose GIL is held": "seconds until a signal counts as unheard",
    "SIGTERM to a run with processes on a Ray cluster": "whole runs with clusters of their own",
}


def promises() -> dict[str, list[tuple[str, list[str]]]]:
    """Promise -> the files of its tests, each with words of their names (none: the whole file)."""
    found = {}
    for line in PAGE.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 2 and "`tests/" in cells[1]:
            tests = re.findall(r"`(tests/[\w/]+\.py)`(?: \(([^)]*)\))?", cells[1])
            found[cells[0]] = [(file, re.findall(r"`(\w+)`", words)) for file, words in tests]
    return found


def collected(*options: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def shown_by(tests: list[tuple[str, list[str]]], names: list[str]) -> list[str]:
    return [
        name
        for name in names
        for file, words in tests
        if name.startswith(f"{file}::") and (not words or any(word in name for word in words))
    ]


def test_every_file_that_a_promise_names_is_there() -> None:
    files = {file for tests in promises().values() for file, _ in tests}
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []


@pytest.mark.slow
def test_every_promise_has_a_test_and_a_quick_one() -> None:
    all_names, quick = collected("-m", "not gpu"), collected("-m", "not gpu and not slow")
    rows = promises()
    assert len(rows) > 40
    of_vllm = {promise for promise, tests in rows.items() if all("vllm" in file for file, _ in tests)}
    missing = [promise for promise in rows.keys() - of_vllm if not shown_by(rows[promise], all_names)]
    assert missing == []
    only_slow = {promise for promise in rows.keys() - of_vllm if not shown_by(rows[promise], quick)}
    unexplained = [promise for promise in only_slow if not promise.startswith(tuple(ONLY_SLOW))]
    assert unexplained == []
    assert [start for start in ONLY_SLOW if not any(promise.startswith(start) for promise in only_slow)] == []
