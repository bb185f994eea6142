"""A soak sees what grows, and nothing grows in thirty steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.benchmarks.conftest import BENCHMARKS

Benchmark = Callable[[str], ModuleType]
ZEROS = dict.fromkeys(("seconds", "memory", "threads", "descriptors", "processes", "shared", "temporary", "log"), 0)

#: A process that leaves something of everything behind at every reading.
LEAKING = """
import json, os, sys, threading
from dataclasses import asdict
from pathlib import Path
folder = Path(sys.argv[1])
sys.path.insert(0, sys.argv[2])
import soak
(folder / "run").mkdir()
meter, kept = soak.Meter(folder), []
for step in range(1, 31):
    kept.append(bytearray(os.urandom(4_000_000)))
    kept.append(open(__file__))
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    Path(f"/dev/shm/{os.environ['VERL_SOAK']}-{step}").write_bytes(bytes(1_000_000))
    (folder / f"left-{step}").write_bytes(bytes(1_000_000))
    with (folder / "run" / "log").open("a") as log:
        log.write("x" * 100 * step)
    print(json.dumps(asdict(meter.read(step))))
for step in range(1, 31):
    Path(f"/dev/shm/{os.environ['VERL_SOAK']}-{step}").unlink()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="reads /proc")
def test_what_grows_is_seen(benchmark: Benchmark, tmp_path: Path) -> None:
    soak = benchmark("soak")
    (tmp_path / "leaking.py").write_text(LEAKING)
    (tmp_path / "folder").mkdir()
    command = [sys.executable, str(tmp_path / "leaking.py"), str(tmp_path / "folder"), str(BENCHMARKS)]
    environment = {**os.environ, soak.MARK: f"test-{os.getpid()}"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    readings = [soak.Reading(**json.loads(line)) for line in done.stdout.splitlines()]
    grown = {name for name, before, after in soak.thirds(readings) if soak.grew(name, before, after)}
    assert grown == {"memory", "threads", "descriptors", "shared", "temporary", "log"}


@pytest.mark.parametrize(
    ("name", "after", "grew"), [("memory", 1027, False), ("memory", 1029, True), ("processes", 1001, True)]
)
def test_a_little_is_no_growth(benchmark: Benchmark, name: str, after: float, grew: bool) -> None:
    assert benchmark("soak").grew(name, 1000, after) is grew


def test_thirds_leave_out_what_warms_up(benchmark: Benchmark) -> None:
    soak = benchmark("soak")
    rows: list[dict[str, Any]] = [
        ZEROS | {"step": step, "memory": memory} for step, memory in enumerate([900, 900, 5, 6, 7, 8], 1)
    ]
    (memory,) = [third for third in soak.thirds([soak.Reading(**row) for row in rows]) if third[0] == "memory"]
    assert memory == ("memory", 5.5, 7.5)


def test_the_end_names_what_grew(
    benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    soak = benchmark("soak")
    readings = [soak.Reading(**ZEROS | {"step": step, "threads": 10 * step}) for step in range(1, 10)]
    monkeypatch.setattr(soak, "soak", lambda *_: readings)
    monkeypatch.setattr(sys, "argv", ["soak.py", "--modes", "async"])
    assert soak.main() == 1
    assert capsys.readouterr().out.splitlines()[-1] == "GREW: threads (async: 50.0 -> 80.0)"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async", "tasks"])
def test_nothing_grows_in_thirty_steps(mode: str) -> None:
    command = [sys.executable, str(BENCHMARKS / "soak.py"), "--modes", mode, "--steps", "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "flat"
