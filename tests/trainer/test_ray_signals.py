"""SIGTERM to a run with processes on a Ray cluster of its own: a checkpoint, 143, and nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ENV
from tests.trainer.runs import count_lines, run_dir, settings
from verl.checkpoint.store import load_checkpoint

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

KINDS: dict[str, dict[str, Any]] = {
    "reward workers": {"reward.workers": 2},
    "ranks": {"trainer.placement": "cpu:0-1"},
    "rollout workers": {"trainer.max_staleness": 1, "actor_rollout_ref.rollout.num_rollout_workers": 1},
}


def descendants(pid: int) -> set[int]:
    """All processes below one, and those that Ray moved elsewhere but that have its session in their command lines."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def living(pids: set[int]) -> dict[int, str]:
    found = {}
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z":
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:100]
        except OSError:
            continue
    return found


def sessions() -> set[Path]:
    return set((Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray").glob("session_*"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("signals", [1, 2])
def test_sigterm_with_ray_saves_and_leaves_nothing(tmp_path: Path, tiny: Path, kind: str, signals: int) -> None:
    changes = {"trainer.total_steps": 10**5, "trainer.save_every": 10**5, "data.eval": None, "trainer.eval_every": None}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(settings(tmp_path, tiny, **changes, **KINDS[kind])))
    before = sessions()
    process = subprocess.Popen(
        [sys.executable, "-m", "verl", "train", str(file)],
        env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    metrics = tmp_path / "runs" / "latest" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < deadline and count_lines(metrics) < 3:
        time.sleep(0.1)
    started = descendants(process.pid) - {process.pid}
    made = sessions() - before
    assert len(started) >= 4 and made
    process.send_signal(signal.SIGTERM)
    if signals == 2:
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, errors[-3000:]
    assert "stack" not in errors.lower() and "Fatal" not in errors, errors[-3000:]
    until = time.monotonic() + 5
    while living(started) and time.monotonic() < until:
        time.sleep(0.1)
    assert not living(started)
    assert not sessions() - before
    if signals == 1:
        last = json.loads(metrics.read_text().splitlines()[-1])["step"]
        assert load_checkpoint(run_dir(tmp_path) / "checkpoints" / "latest").step == last
