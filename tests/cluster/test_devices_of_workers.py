"""Each worker sees the device that Ray gave it, none of the driver's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray._private.accelerators import NvidiaGPUAcceleratorManager

from verl._host import device
from verl._host import ray_session as cluster
from verl.cluster.controller import Controller
from verl.cluster.ray import pool

ROOT = Path(__file__).resolve().parent.parent.parent
NAME = "CUDA_VISIBLE_DEVICES"


@pytest.mark.slow
def test_workers_have_devices_of_their_own() -> None:
    """Of four the driver uses the first, where its model goes, and the third, where it holds a tensor."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OF_THE_DRIVER": "yes", NAME: "4,5,6,7"}
    env.pop("RAY_ADDRESS", None)
    command = [sys.executable, str(Path(__file__).with_name("visible_devices.py"))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [["5", "yes"], ["7", "yes"]]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four, none of which holds anything."""
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    nothing = set[str]()
    monkeypatch.setattr(device, "claimed", nothing)
    monkeypatch.setattr("verl.cluster.controller.claimed", nothing)
    monkeypatch.setattr(device, "initialize", lambda: None)
    monkeypatch.setattr(NvidiaGPUAcceleratorManager, "get_current_node_num_accelerators", staticmethod(lambda: 4))
    monkeypatch.delenv(NAME, raising=False)


def visible() -> str | None:
    """To a cluster that starts now."""
    before = os.environ.get(NAME)
    with cluster._devices_of_workers():
        seen = os.environ.get(NAME)
    assert os.environ.get(NAME) == before
    return seen


@pytest.mark.usefixtures("gpus")
def test_a_cluster_has_what_the_driver_does_not_use(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("verl.cluster.controller.count", lambda kind: 4)
    assert visible() is None
    Controller("cpu").group("reward", partial(object))
    assert visible() is None
    for place, rest in (("cuda:0", "1,2,3"), ("cuda:2", "1,3"), ("cuda:1", "3")):
        Controller(place).group("actor", partial(object))
        assert visible() == rest
    monkeypatch.setenv(NAME, "7,5,GPU-1,GPU-2")
    assert visible() == "GPU-2" and not caplog.messages
    monkeypatch.setenv(NAME, "7,5")
    assert visible() == "7,5"
    assert caplog.messages == ["workers share the GPUs of this process, which uses all 2 that it sees"]
    monkeypatch.setenv(NAME, "")
    assert visible() == ""


@pytest.mark.usefixtures("gpus")
def test_ranks_of_a_job_have_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    job = SimpleNamespace(size=6, has_started=True)
    monkeypatch.setattr("verl.cluster.torchrun.transport.this_job", lambda: job)
    Controller()
    assert visible() == "3"


def test_what_the_driver_sees_is_not_sent_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "is_own", lambda: True)
    kept = ("CUDA", "HIP", "ROCR", "ASCEND_RT")
    names = [*(f"{vendor}_VISIBLE_DEVICES" for vendor in kept), "HABANA_VISIBLE_MODULES", "ZE_AFFINITY_MASK"]
    for name in (*names, "OF_THE_DRIVER"):
        monkeypatch.setenv(name, "0,1")
    env, _, _ = pool._surroundings()
    assert env["OF_THE_DRIVER"] == "0,1"
    assert not set(names) & env.keys()
