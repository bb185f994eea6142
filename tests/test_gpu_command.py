"""`make gpu`: fails where there is no accelerator, and every command of it runs on a CPU with a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl import device

ROOT = Path(__file__).resolve().parent.parent


def gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=400, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


@pytest.mark.skipif(device.accelerator() is not None, reason="there is an accelerator")
def test_without_an_accelerator_it_says_so_and_fails(tmp_path: Path) -> None:
    done = gpu("--page", str(tmp_path / "page.md"))
    assert done.returncode == 1
    assert "torch finds no accelerator on this machine" in done.stderr
    assert not (tmp_path / "page.md").exists()


@pytest.mark.slow
def test_every_command_runs_on_a_cpu(tmp_path: Path) -> None:
    page, made = tmp_path / "page.md", tmp_path / "made"
    done = gpu("--device", "cpu", "--models", "tiny", "--no-peers", "--page", str(page), "--made", str(made))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    text = page.read_text(encoding="utf-8")
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert [line.split(":")[0] for line in headings] == [
        "## Tests",
        "## Exactness",
        "## Rollout, tiny",
        "## GRPO step, tiny",
    ]
    assert all(": passed in " in line for line in headings)
    assert "greedy: 3 of 3 equal" in text and '"engine": "embedded"' in text and "micro-batch 32" in text


@pytest.mark.slow
def test_a_command_that_fails_is_on_the_page_and_fails_the_whole(tmp_path: Path) -> None:
    nowhere, page = tmp_path / "no model here", tmp_path / "page.md"
    done = gpu("--device", "cpu", "--models", str(nowhere), "--no-peers", "--page", str(page), "--only", "Rollout")
    assert done.returncode == 1 and "1 of 1 commands failed" in done.stderr
    assert ": FAILED (" in page.read_text(encoding="utf-8")
