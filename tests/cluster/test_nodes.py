"""One map on two nodes, under torchrun and on Ray: the parameters, metrics and samples of one process."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests import ranks
from tests.cluster.test_torchrun import SCRIPT, assert_equal_runs
from tests.nodes import Node, two_nodes

pytestmark = pytest.mark.slow
#: Seconds for all that a test waits for.
DEADLINE = 270
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2", "--master_port=29400"]
RAY = [
    sys.executable,
    "-m",
    "ray.scripts.scripts",
    "start",
    "--num-cpus=2",
    "--object-store-memory=80000000",
    "--block",
]


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    with tempfile.TemporaryDirectory(prefix="v", ignore_cleanup_errors=True) as folder, two_nodes(Path(folder)) as made:
        yield made


@pytest.fixture(scope="module")
def one(make_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """Arguments of the script, of which the second is where it writes and the third the map, and what one process made
    of them."""
    model, reward, out = make_tiny("gpt2", torch.float64), tmp_path_factory.mktemp("r"), tmp_path_factory.mktemp("one")
    scorer = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float64)
    scorer.save_pretrained(reward)
    AutoTokenizer.from_pretrained(model).save_pretrained(reward)
    arguments = [model, out, "null", "null", "8", json.dumps(str(reward))]
    ranks.alone(SCRIPT, *arguments)
    return arguments, out


def script(one: tuple[list[Any], Path], out: Path, placement: Any) -> list[Any]:
    model, _, _, *rest = one[0]
    return [SCRIPT, model, out, json.dumps(placement), *rest]


def ended(*processes: subprocess.Popen[str]) -> None:
    """Wait until all have ended well."""
    until = time.monotonic() + DEADLINE
    for process in processes:
        text, _ = process.communicate(timeout=max(1.0, until - time.monotonic()))
        assert process.returncode == 0, text[-4000:]


def test_two_agents_of_torchrun_have_one_map(
    nodes: tuple[Node, Node], one: tuple[list[Any], Path], tmp_path: Path
) -> None:
    placement = {
        "actor": {"cpu_ids": [0, 1], "parallel": "tensor"},
        "critic": {"cpu_ids": [2], "parallel": "data"},
        "reward": {"cpu_ids": [2, 3]},
    }
    line = script(one, tmp_path, placement)
    agents = [
        node.start(*TORCHRUN, f"--node_rank={rank}", f"--master_addr={nodes[0].address}", *line)
        for rank, node in enumerate(nodes)
    ]
    ended(*agents)
    assert_equal_runs(one[1], tmp_path, rewards=1e-12)


def test_two_nodes_of_ray_have_one_map(nodes: tuple[Node, Node], one: tuple[list[Any], Path], tmp_path: Path) -> None:
    first, second = nodes
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    address = f"{first.address}:6379"
    head = ["--head", "--port=6379", "--include-dashboard=false", f"--node-ip-address={first.address}"]
    first.start(*RAY, *head, env=env)
    wait_for_head(first, 6379)
    second.start(*RAY, f"--address={address}", f"--node-ip-address={second.address}", env=env)
    wait_for_two(first, {**env, "RAY_ADDRESS": address})
    placement = {
        "actor": {"cpu_ids": [0, 1], "parallel": "tensor", "node": 0},
        "critic": {"cpu_ids": [2], "parallel": "data", "node": second.address},
        "reward": {"cpu_ids": [2, 3], "node": second.address},
    }
    line = script(one, tmp_path, placement)
    ended(first.start(sys.executable, *line, env={**env, "RAY_ADDRESS": address}))
    assert_equal_runs(one[1], tmp_path, rewards=1e-12)


def wait_for_head(node: Node, port: int) -> None:
    """Until something listens there."""
    code = (
        "import socket, sys, time\nuntil = time.monotonic() + 100\n"
        "while socket.socket().connect_ex((sys.argv[1], int(sys.argv[2]))):\n"
        "    assert time.monotonic() < until\n    time.sleep(0.1)\n"
    )
    ended(node.start(sys.executable, "-c", code, node.address, str(port)))


def wait_for_two(node: Node, env: dict[str, str]) -> None:
    """Until the cluster has two living nodes."""
    code = (
        "import os, ray, time\nuntil = time.monotonic() + 100\n"
        "ray.init(os.environ['RAY_ADDRESS'], logging_level='ERROR')\n"
        "while sum(node['Alive'] for node in ray.nodes()) < 2:\n"
        "    assert time.monotonic() < until\n    time.sleep(0.2)\n"
    )
    ended(node.start(sys.executable, "-c", code, env=env))
