"""Worker processes of a pool on the nodes of a Ray cluster."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.controller.pool import close_all
from verl.controller.ray import connect
from verl.workers.process import main

#: What a worker takes of a node's CPUs: next to none, so that no map of placement keeps it from starting, but nothing
#: where there are none for work.
_CPUS = 0.001
# Registered after Ray's own, and so before it: workers that ended with the cluster would be replaced, and a call of Ray
# after its end ends this process with an error.
atexit.register(close_all)


def address() -> str | None:
    """Where workers on the nodes find this process; None: there is no node but this one."""
    connect()
    several = sum(node["Alive"] for node in ray.nodes()) > 1
    return ray.util.get_node_ip_address() if several else None


def launch(command: Sequence[str], env: Mapping[str, str], fds: Sequence[int], *, gpus: int = 0) -> RayProcess:
    """`verl.controller.pool.launch` on the nodes in turn. The process ends with its node and with this one; it inherits
    no file, and of this one's environment the number of threads alone."""
    threads = {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    host = ray.remote(max_restarts=0, num_cpus=_CPUS, num_gpus=gpus)(_Host).options(scheduling_strategy="SPREAD")
    return RayProcess(host.remote(), command[3:], {**threads, **env})


class RayProcess:
    """As much of `subprocess.Popen` as a pool uses, of a process on a Ray node. However it ended: as if by SIGKILL."""

    def __init__(self, host: Any, args: Sequence[str], env: Mapping[str, str]) -> None:
        self._host = host
        # Futures, since such a call of Ray may come from any thread at any time.
        self._about: Future[tuple[str, int]] = host.about.remote().future()
        self._end: Future[None] = host.run.remote(list(args), dict(env)).future()

    @property
    def node(self) -> str:
        """Ray's name of its node; "" while it starts."""
        return self._about.result()[0] if self._has_begun else ""

    @property
    def pid(self) -> int:
        """0 while it starts."""
        return self._about.result()[1] if self._has_begun else 0

    @property
    def _has_begun(self) -> bool:
        return self._about.done() and self._about.exception() is None

    def poll(self) -> int | None:
        return -signal.SIGKILL if self._end.done() or not ray.is_initialized() else None

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None and wait([self._end], timeout).not_done:
            raise subprocess.TimeoutExpired("a process on a Ray node", timeout or 0.0)
        return -signal.SIGKILL

    def send_signal(self, sig: int) -> None:
        if self.poll() is None and self._has_begun:
            there = NodeAffinitySchedulingStrategy(self.node, soft=False)
            ray.remote(num_cpus=0, max_retries=0)(_signal).options(scheduling_strategy=there).remote(self.pid, sig)

    def kill(self) -> None:
        """Its children too, as Ray does it."""
        if self.poll() is None:
            ray.kill(self._host)


def _signal(pid: int, sig: int) -> None:
    os.kill(pid, sig)


class _Host:
    """The process itself: an actor that becomes a worker."""

    def about(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def run(self, args: list[str], env: dict[str, str]) -> None:
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's own: one
        os.environ |= env
        sys.path += [folder for folder in env["PYTHONPATH"].split(os.pathsep) if folder not in sys.path]
        try:
            main(*args)
        except Exception:
            traceback.print_exc()  # Ray brings it to whoever asked: it may have been unable to come to them
        finally:
            os._exit(0)  # an actor that has nothing to do would stay
