"""Pools of workers that come and go while a run goes on: Ray actors, replaced when they die, scaled, dumped, ended.

`RolloutPool` and `RewardPool` say what their workers do; all else is here.
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from verl._base.checked import checked
from verl._base.record import Processes
from verl._host.ray_session import check_count, connect, device_variables, is_own
from verl.errors import ClusterError, ConfigError

logger = logging.getLogger(__name__)

#: Deaths in a row of workers that were not ready, after which the run ends.
MAX_DEATHS = 3
#: Seconds that a pool must have been larger than its work needs before it loses a worker.
PATIENCE = 30.0
#: What a worker takes of a node's CPUs: next to none, so that no placement keeps it from starting, but nothing
#: where there are none for work.
_CPUS = 0.001
#: All pools of this process.
POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()
_once_at_exit = functools.cache(atexit.register)


def close_all() -> None:
    """End the workers of all pools."""
    for pool in list(POOLS):
        pool.close()


def check_range(role: str, least: int, most: int | None) -> tuple[int, int]:
    """Fewest and most workers of a pool; `most` None: as many as `least`.

    Raises:
        ConfigError: this is no range that begins at 1 or above, or ends above what this machine bears.
    """
    if least < 1 or (most or least) < least:
        raise ConfigError(f"{role} workers: at least one, and {least} to {most or least} of them is no range")
    check_count(most or least, f"{role} workers")
    return least, most or least


@dataclass(eq=False)
class Worker:
    """A Ray actor, and its unfinished jobs by name.

    Attributes:
        started: when its process was.
        ran: when it was ready for jobs; None: not yet.
    """

    role: str
    index: int
    actor: Any
    started: float = field(default_factory=time.monotonic)
    ran: float | None = None
    host: str = "a host not known yet"
    node: str = ""
    pid: int = 0
    jobs: dict[str, Any] = field(default_factory=dict)
    is_ready: bool = False
    is_leaving: bool = False
    is_killed: bool = False

    def __str__(self) -> str:
        return f"{self.role} worker {self.index} (pid {self.pid or 'unknown'} on {self.host})"


class Pool:
    """Workers of one role.

    Nothing here waits for a worker: answers are put into `events`, as (worker, name of the call, answer or
    exception). Any thread may call `scale` while another works.

    Args:
        least, most: workers between which `fit` chooses.
    """

    role: ClassVar[str]
    #: The class of the actors, a `PooledWorker`.
    worker_class: ClassVar[type[Any]]
    #: Of a failure of a worker's own code.
    error_class: ClassVar[type[Exception]]
    #: Threads of an actor beside the main one, by group.
    concurrency_groups: ClassVar[dict[str, int]] = {}
    #: GPUs that a worker takes of the cluster.
    gpus = 0

    def __init__(self, least: int, most: int | None = None) -> None:
        self.least, self.most = check_range(self.role, least, most)
        self.events: queue.SimpleQueue[tuple[Worker, str, Any]] = queue.SimpleQueue()
        self.lock = threading.RLock()
        self._workers: list[Worker] = []
        self._next = 0
        self._deaths, self._death = 0, 0.0
        self._ample_since, self._needed = 0.0, 0
        POOLS.add(self)

    @property
    def workers(self) -> list[Worker]:
        """The workers that are to stay."""
        return [worker for worker in self._workers if not worker.is_leaving]

    @property
    def size(self) -> int:
        return len(self.workers)

    @checked
    def scale(self, size: Processes) -> None:
        """Have this many workers from now on.

        Raises:
            ConfigError: fewer than one, more than this machine bears, or Ray is not installed.
            ClusterError: there is no Ray cluster, see `cluster.connect`.
        """
        check_count(size, f"{self.role} workers")
        with self.lock:
            self._ample_since, self._needed = time.monotonic(), 0
            for worker in self.workers[size:]:
                worker.is_leaving = True
                self._leave(worker)
                if not worker.jobs:
                    self._end(worker)
            while self.size < size:
                self._start()

    def fit(self, load: float, seconds: float) -> None:
        """Have as many workers, within `least` and `most`, as do `load` worker-seconds of work in `seconds`: more at
        once, fewer when fewer have been enough for `PATIENCE` seconds."""
        if self.least == self.most:
            return
        wanted = min(max(math.ceil(load / seconds), self.least), self.most)
        now, size = time.monotonic(), self.size
        self._needed = max(self._needed, wanted)
        if wanted > size or (self._needed < size and now - self._ample_since > PATIENCE):
            logger.info("%s workers: %d instead of %d", self.role, self._needed, size)
            self.scale(self._needed)
        elif self._needed >= size:
            self._ample_since, self._needed = now, 0

    def dump_stacks(self) -> None:
        """Have all workers write the stacks of their threads to their stderr, which Ray copies to this process's."""
        for worker in [worker for worker in self._workers if worker.pid]:
            logger.error("%s: the stacks of its threads follow on its stderr", worker)
            _signal(worker)
            time.sleep(0.1)  # one after the other, to be read

    def close(self) -> None:
        """End all workers, now."""
        with self.lock:
            for worker in list(self._workers):
                self._end(worker)

    def _begin(self, worker: Worker) -> None:
        """The first calls of a new worker; once they show that it can work, it `is_ready`."""
        raise NotImplementedError

    def _leave(self, worker: Worker) -> None:
        """Hook: take its jobs from a worker that is to leave. One with jobs ends once they are done."""

    def _start(self) -> None:
        ray = connect()
        # Before Ray's own end, which would look like the death of every worker: so once Ray is imported.
        _once_at_exit(close_all)
        actor = ray.remote(
            max_restarts=0, num_cpus=_CPUS, num_gpus=self.gpus, concurrency_groups=self.concurrency_groups
        )(self.worker_class)
        worker = Worker(self.role, self._next, actor.options(scheduling_strategy="SPREAD").remote())
        self._next += 1
        self._workers.append(worker)
        self._call(worker, "start", self.worker_class.start, f"{self.role} worker {worker.index}", *_surroundings())
        self._begin(worker)

    def _call(self, worker: Worker, name: str, method: Callable[..., Any], *args: Any) -> None:
        """Begin a call of a worker's method; its end is an event."""
        future = getattr(worker.actor, method.__name__).remote(*args).future()
        future.add_done_callback(lambda done: self.events.put((worker, name, done.exception() or done.result())))

    def _end(self, worker: Worker) -> None:
        self._workers.remove(worker)
        kill(worker)

    def _replace_dead(self, worker: Worker, error: Exception) -> str:
        """How a worker died; another one takes its place, unless it was to leave.

        Raises:
            RewardError, RolloutError: its own code failed; with its traceback.
            ClusterError: workers die again and again.
        """
        from ray.exceptions import RayTaskError

        self._end(worker)
        if isinstance(error, RayTaskError):
            raise self.error_class(f"{worker} failed:\n{error}")
        how = _how(error)
        if worker.is_leaving:
            return how
        if not worker.is_ready and worker.started >= self._death:  # those that died together are one death
            self._deaths, self._death = self._deaths + 1, time.monotonic()
        if self._deaths >= MAX_DEATHS:
            raise ClusterError(f"{worker} {how}, as {self._deaths - 1} did before it: is there memory enough for it?")
        logger.warning("%s %s; another one takes its place", worker, how)
        self._start()
        return how


def kill(worker: Worker) -> None:
    """End a worker and all that it started, without waiting for it."""
    import ray

    worker.is_killed = True
    if ray.is_initialized():
        ray.kill(worker.actor)


def _how(error: Exception) -> str:
    """What happened to a worker whose call ended with an error of Ray."""
    from ray.exceptions import ActorUnavailableError, OutOfMemoryError

    if isinstance(error, OutOfMemoryError):
        return "was ended by Ray, since its node was out of memory"
    if isinstance(error, ActorUnavailableError):
        return "cannot be reached"
    return "died (its process was killed or crashed)"


def _surroundings() -> tuple[dict[str, str], Sequence[str], str]:
    """A worker's environment variables, import path and working directory. Ray decides which devices it sees. On a
    cluster that this run did not start, only the number of threads is passed on from this process's environment."""
    kept = device_variables()
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_") and name not in kept}
    if not is_own():
        env = {name: env[name] for name in ("OMP_NUM_THREADS",) if name in env}
    return env, sys.path, os.getcwd() if is_own() else ""


def _signal(worker: Worker) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    with suppress(OSError, ray.exceptions.RayError):
        if worker.host == socket.gethostname():
            os.kill(worker.pid, signal.SIGUSR1)
        elif ray.is_initialized():
            there = NodeAffinitySchedulingStrategy(worker.node, soft=False)
            ray.remote(num_cpus=0, max_retries=0)(os.kill).options(scheduling_strategy=there).remote(
                worker.pid, signal.SIGUSR1
            )
