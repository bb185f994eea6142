"""`verl train` under torchrun: one run of several ranks, with one run directory, that a dead rank ends and a
second start takes up."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import ENV, command, job
from tests.trainer.runs import assert_same_run, count_lines, final_state, rows, run_dir, settings
from verl.config import build_config
from verl.run.train import train


def start(file: Path, configuration: dict[str, Any]) -> list[str]:
    file.write_text(json.dumps(configuration))
    return ["-m", "verl", "train", str(file)]


def test_a_run_of_two_ranks_is_one_run(tmp_path: Path, tiny: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    changes = {"trainer.placement": {"rollout": "cpu:0-1"}, "trainer.total_steps": 3}
    train(build_config(settings(tmp_path / "one", tiny, **{"trainer.total_steps": 3})))
    done = job(2, *start(tmp_path / "run.yaml", settings(tmp_path / "two", tiny, **changes)))
    one, two = run_dir(tmp_path / "one"), run_dir(tmp_path / "two")
    ours, theirs = final_state(one), final_state(two)
    assert max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours) < 1e-3
    assert [(row["step"], row.get("reward")) for row in rows(one)] == [
        (row["step"], row.get("reward")) for row in rows(two)
    ]
    assert done.stdout.count("peak memory") == 1
    assert done.stderr.count("going on") == 0 and "cpu:1  1/2" in done.stderr
    first, second = (two / "logs" / name for name in ("001.log", "001.rank1.log"))
    assert "rank 0 of 2, host" in first.read_text() and "rank 1 of 2, host" in second.read_text()
    for number, log in enumerate((first, second)):
        shown = r"actor: ([\d,]+) parameters in float32; strategy ddp on 2 ranks \(replicate 2\); weights \d+ whole; "
        assert re.search(rf"{shown}rank {number} of 2 holds \1 on cpu", log.read_text())
    assert {path.name for path in two.glob("*.json*")} >= {"metrics.jsonl", "summary.json", "eval.jsonl"}
    # The next start, in one process, finds a finished run of the same settings and length.
    assert json.loads((two / "summary.json").read_text())["state"] == "finished"


@pytest.mark.slow
def test_a_run_goes_on_under_another_strategy(tmp_path: Path, make_tiny: Callable[..., Path]) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    model = make_tiny("llama", torch.float64)
    same = {"actor_rollout_ref.model.dtype": "float64", "data.eval": None, "trainer.eval_every": None}
    part = "actor_rollout_ref.actor."

    def until(step: int, **changes: Any) -> dict[str, Any]:
        return settings(tmp_path / "parts", model, **same, **{"trainer.total_steps": step}, **changes)

    job(2, *start(tmp_path / "fsdp.yaml", until(2, **{f"{part}strategy": "fsdp"})))
    job(2, *start(tmp_path / "tp.yaml", until(4, **{f"{part}tensor_parallel_size": 2})))
    train(build_config(until(6)))
    train(build_config(settings(tmp_path / "whole", model, **same)))
    whole, parts = run_dir(tmp_path / "whole"), run_dir(tmp_path / "parts")
    assert [len([*(path / "logs").glob("00?.log")]) for path in (whole, parts)] == [1, 3]
    found, expected = (
        [(row["step"], row["loss/actor"], row["reward"]) for row in rows(path)] for path in (parts, whole)
    )
    assert len(expected) == 6 and found == [pytest.approx(row, abs=1e-9) for row in expected]
    ours, theirs = final_state(parts), final_state(whole)
    weights = [name for name in theirs if name.startswith("actor/weights:")]
    # AdamW divides a gradient by its size: rounding moves a weight further whose gradient is near 0.
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in weights) < 1e-6


def ranks_of(agent: int) -> dict[int, int]:
    """Rank -> process, of a torchrun agent's children."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            lines = (stat.parent / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ranks = [int(line[5:]) for line in lines if line.startswith(b"RANK=")]
        if parent == agent and ranks:
            found[ranks[0]] = int(stat.parent.name)
    return found


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_and_the_same_command_resumes(tmp_path: Path, tiny: Path) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    longer = {"trainer.total_steps": 40, "trainer.save_every": 1, "data.eval": None, "trainer.eval_every": None}
    job(3, *start(tmp_path / "whole.yaml", settings(tmp_path / "whole", tiny, **longer)))
    line = command(3, *start(tmp_path / "cut.yaml", settings(tmp_path / "cut", tiny, **longer)))
    metrics, rng = tmp_path / "cut" / "runs" / "latest" / "metrics.jsonl", random.Random(0)
    for rank in (1, 0):
        wanted = count_lines(metrics) + 1
        process = subprocess.Popen(line, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while process.poll() is None and count_lines(metrics) <= wanted:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        os.kill(ranks_of(process.pid)[rank], signal.SIGKILL)
        began = time.monotonic()
        _, errors = process.communicate(timeout=120)
        assert time.monotonic() - began < 60
        assert process.returncode != 0
        died = (
            rf"rank {rank} of 3 \(host .*, pid \d+\) died"
            if rank
            else "ClusterError: .* rank 0, which runs the script, died"
        )
        assert re.search(died, errors), errors[-3000:]
        assert "SIGKILL" in errors
    job(3, *line[line.index("-m", 3) :])
    assert_same_run(run_dir(tmp_path / "whole"), run_dir(tmp_path / "cut"))


@pytest.mark.slow
def test_sigterm_at_one_rank_saves_and_ends_all(tmp_path: Path, tiny: Path) -> None:
    changes = {"trainer.total_steps": 100000, "trainer.save_every": 100000}
    line = command(2, *start(tmp_path / "run.yaml", settings(tmp_path, tiny, **changes)))
    process = subprocess.Popen(line, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "runs" / "latest" / "metrics.jsonl"
    while process.poll() is None and count_lines(metrics) <= 2:
        time.sleep(0.1)
    os.kill(ranks_of(process.pid)[1], signal.SIGTERM)
    _, errors = process.communicate(timeout=100)
    last = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert (run_dir(tmp_path) / "checkpoints" / "latest").resolve().name == f"step-{last:06d}", errors[-2000:]
