"""Points, results, exponents and picture of how time grows with the work."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.benchmarks.conftest import BENCHMARKS

Benchmark = Callable[[str], ModuleType]


@pytest.fixture
def growth(benchmark: Benchmark) -> ModuleType:
    return benchmark("growth")


def arguments(out: Path, **changes: Any) -> Namespace:
    usual = {"smoke": False, "large": False, "only": None, "points": [], "systems": ["ours", "vllm", "trl"]}
    return Namespace(**usual | {"dtype": "bf16", "limit": 600.0, "budget": 3600.0, "out": out} | changes)


def result(part: str, system: str, samples: int, seconds: float, **changes: Any) -> dict[str, Any]:
    ceiling = seconds / 2 if system == "ours" else None
    point = {"samples": samples, "length": 128, "model": "smollm2-135m", "dtype": "bf16"}
    measured = {"verdict": "", "seconds": seconds, "memory_gb": 1.0, "ceiling_seconds": ceiling}
    return {"part": part, "system": system, **point, **measured, **changes}


def test_one_factor_changes_at_a_time(growth: ModuleType, tmp_path: Path) -> None:
    every = growth.points(arguments(tmp_path))
    assert every[0] == growth.BASE and len(every) == len(set(every)) == 7
    assert all(sum(vars(point)[f] != vars(growth.BASE)[f] for f in growth.FACTORS) == 1 for point in every[1:])
    assert {point.samples for point in every} == {16, 32, 64, 128}
    assert len(growth.points(arguments(tmp_path, large=True))) == 10
    assert len(growth.points(arguments(tmp_path, only="model"))) == 2
    picked = growth.points(arguments(tmp_path, points=["samples=64", "length=512"]))
    assert [(point.samples, point.length) for point in picked] == [(64, 128), (32, 512)]


def test_results_are_written_at_once_and_not_measured_again(
    growth: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[str, int]] = []

    def run(system: str, point: Any, args: Namespace, seconds: float) -> dict[str, Any]:
        calls.append((system, point.samples))
        if system == "trl":
            raise subprocess.TimeoutExpired("trl", seconds)
        if system == "vllm" and len(calls) < 8:
            raise SystemExit("vllm failed")
        return {"seconds": 2.0, "memory_gb": 1.0, "ceiling_seconds": 1.0 if system == "ours" else None}

    monkeypatch.setattr(growth, "RUNS", {"rollout": run, "step": run})
    args = arguments(tmp_path, points=["samples=16"])
    results: list[dict[str, Any]] = []
    growth.measure(args, results)
    assert calls == [("ours", 16), ("vllm", 16), ("ours", 16), ("trl", 16)]
    written = [json.loads(line) for line in (tmp_path / "growth.jsonl").read_text().splitlines()]
    assert written == results and [r["verdict"] for r in results] == ["", "vllm failed", "", "over 600 s"]
    growth.measure(args, results)
    assert calls[4:] == [("vllm", 16)]  # what failed is tried again, what took too long is not
    growth.measure(arguments(tmp_path, budget=-1.0, points=["samples=64"]), results)
    assert len(calls) == 5
    assert "not begun, -1 s are over: ours, rollout, smollm2-135m x 64 x 128" in capsys.readouterr().out


def test_a_signal_ends_it_and_is_no_result(growth: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(system: str, point: Any, args: Namespace, seconds: float) -> dict[str, Any]:
        sys.exit(143)  # what its handler of SIGTERM does

    monkeypatch.setattr(growth, "RUNS", {"rollout": run, "step": run})
    with pytest.raises(SystemExit) as ended:
        growth.measure(arguments(tmp_path), [])
    assert ended.value.code == 143 and not (tmp_path / "growth.jsonl").exists()


def test_exponents_and_shares(growth: ModuleType) -> None:
    results = [result("step", "ours", n, 0.5 * n) for n in (16, 32, 64)]
    results += [result("step", "trl", n, 0.1 * n**1.5) for n in (16, 32, 64)]
    results += [result("step", "trl", 128, 0.0, verdict="over 600 s"), result("step", "ours", 32, 40.0, length=256)]
    lines = growth.table(results, growth.BASE).splitlines()
    assert "| step | smollm2-135m | 32 | 128 | ours | 16.00 | 1.00 | 50% |  |" in lines
    assert f"| step | smollm2-135m | 32 | 128 | trl | {0.1 * 32**1.5:.2f} | 1.00 | 44% | 1.13 |" in lines
    assert "| step | smollm2-135m | 128 | 128 | trl | over 600 s |  |  |  |" in lines
    assert "| step | ours | 1.00 | 1.32 |  |" in lines and "| step | trl | 1.50 |  |  |" in lines


def test_the_picture_is_svg(growth: ModuleType) -> None:
    results = [result("step", "ours", n, 0.5 * n) for n in (16, 32, 64)]
    drawn = ET.fromstring(growth.picture(results, growth.BASE))
    name = "{http://www.w3.org/2000/svg}"
    (line,) = drawn.findall(f"{name}polyline")
    points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert len(points) == 3 and points[0][0] < points[1][0] < points[2][0] and points[0][1] > points[2][1]
    assert growth.picture([], growth.BASE).startswith("<svg")


@pytest.mark.slow
def test_a_tiny_model_goes_through_all_of_it(tmp_path: Path) -> None:
    words = ["--smoke", "--systems", "ours", "--dtype", "fp32", "--no-preload", "--threads", "1"]
    command = [sys.executable, str(BENCHMARKS / "growth.py"), "--out", str(tmp_path), *words, "--models", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in (tmp_path / "growth.jsonl").read_text().splitlines()]
    assert [(r["part"], r["samples"]) for r in results] == [
        ("rollout", 16),
        ("step", 16),
        ("rollout", 32),
        ("step", 32),
    ]
    assert all(0 < r["ceiling_seconds"] < r["seconds"] for r in results)
    assert (tmp_path / "growth.svg").exists() and "| step | ours |" in (tmp_path / "growth.md").read_text()
