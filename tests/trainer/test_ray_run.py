"""`verl train` on a Ray cluster: a run that a dead rank or a lost node ends, and a second start takes up."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ENV
from tests.trainer.test_run import assert_same_run, count_lines, run_dir, settings

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow
CHANGES = {"trainer.total_steps": 20, "trainer.save_every": 1, "data.eval": None, "trainer.eval_every": None}


def command(folder: Path, model: Path, placement: Any) -> list[str]:
    folder.mkdir(exist_ok=True)
    file = folder / "run.yaml"
    file.write_text(json.dumps(settings(folder, model, **CHANGES, **{"trainer.placement": placement})))
    return [sys.executable, "-m", "verl", "train", str(file)]


def whole(folder: Path, model: Path, placement: Any, env: dict[str, str] = ENV) -> None:
    done = subprocess.run(command(folder, model, placement), env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]


def interrupted(line: list[str], folder: Path, harm: Callable[[dict[int, int]], None], env: dict[str, str]) -> str:
    """Start a run, do harm to it in its second step or later (given rank -> process); what it said at its end."""
    metrics, logs = folder / "runs" / "latest" / "metrics.jsonl", folder / "runs" / "latest" / "logs"
    wanted = count_lines(metrics) + 1
    process = subprocess.Popen(line, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and count_lines(metrics) <= wanted:
        time.sleep(0.01)
    time.sleep(random.Random(0).uniform(0, 0.3))
    newest = max(int(log.name[:3]) for log in logs.glob("*.rank0.log"))
    told = {rank: (logs / f"{newest:03d}.rank{rank}.log").read_text() for rank in (0, 1)}
    harm({rank: int(re.findall(r"process (\d+)", text)[-1]) for rank, text in told.items()})
    began = time.monotonic()
    _, errors = process.communicate(timeout=120)
    assert time.monotonic() - began < 60
    assert process.returncode != 0, errors[-3000:]
    return errors


def test_a_killed_rank_ends_the_run_and_the_same_command_resumes(tmp_path: Path, tiny: Path) -> None:
    whole(tmp_path / "whole", tiny, "cpu:0-1")
    line = command(tmp_path / "cut", tiny, "cpu:0-1")
    for rank in (1, 0):
        errors = interrupted(line, tmp_path / "cut", lambda pids, rank=rank: os.kill(pids[rank], signal.SIGKILL), ENV)
        assert re.search(rf"rank {rank} of 2 \(slot cpu:{rank}, host .*\) died", errors), errors[-3000:]
    whole(tmp_path / "cut", tiny, "cpu:0-1")
    assert_same_run(run_dir(tmp_path / "whole"), run_dir(tmp_path / "cut"))


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes of one CPU each, on this machine."""
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 100 << 20}
    made = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    made.small = small
    made.second = made.add_node(**small)
    yield made
    made.shutdown()


def test_a_lost_node_ends_the_run_and_the_same_command_resumes(tmp_path: Path, tiny: Path, cluster: Any) -> None:
    # What Ray has put into the environment of this process says how one talks to its cluster.
    env = {**os.environ, **ENV, "RAY_ADDRESS": cluster.address}
    whole(tmp_path / "whole", tiny, "cpu:0-1", env)
    line = command(tmp_path / "cut", tiny, "cpu:0-1")
    errors = interrupted(
        line, tmp_path / "cut", lambda _: cluster.remove_node(cluster.second, allow_graceful=False), env
    )
    assert re.search(r"ClusterError|rank \d of 2 .* died", errors), errors[-3000:]
    cluster.add_node(**cluster.small)
    whole(tmp_path / "cut", tiny, "cpu:0-1", env)
    assert_same_run(run_dir(tmp_path / "whole"), run_dir(tmp_path / "cut"))
