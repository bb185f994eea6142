"""Pools of worker processes: started, told things, listened to, replaced when they die, scaled, dumped, ended.

`RolloutPool` and `RewardPool` say what their workers are told and what they answer; all else is here.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Protocol

from verl.errors import ClusterError, ConfigError
from verl.workers.channel import Channel, Door, Message, bound_sends
from verl.workers.process import TOKEN

logger = logging.getLogger(__name__)

#: Deaths in a row of workers that were not ready, after which the run ends.
MAX_DEATHS = 3
#: Seconds from the start of a process until it must have come to a `Door`.
START_DEADLINE = 120
#: Seconds that a pool must have been larger than its work asks for before it loses a worker.
PATIENCE = 30.0
#: Seconds that a killed process may take to end.
_END_DEADLINE = 10
_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()


class Process(Protocol):
    """A process that was started, here or elsewhere: as much of `subprocess.Popen` as a pool uses."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...


class _LocalProcess(subprocess.Popen[bytes]):
    def kill(self) -> None:
        """Its children too."""
        with suppress(ProcessLookupError, PermissionError):  # the whole group is gone already
            os.killpg(self.pid, signal.SIGKILL)


def launch(command: Sequence[str], env: Mapping[str, str], fds: Sequence[int]) -> Process:
    """Start a command on this machine, in a session of its own.

    Another function of this form may start it elsewhere; then its pool needs `host`, and `fds` is empty.
    """
    return _LocalProcess(
        command, env={**os.environ, **env}, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True
    )


def dump_stacks() -> None:
    """Have the workers of all pools write the stacks of their threads to their stderr."""
    for pool in list(_POOLS):
        pool.dump_stacks()


def close_all() -> None:
    """End the workers of all pools."""
    for pool in list(_POOLS):
        pool.close()


def check_range(role: str, least: int, most: int | None) -> tuple[int, int]:
    """Fewest and most workers of a pool; `most` None: as many as `least`.

    Raises:
        ConfigError: this is no range that begins at 1 or above.
    """
    if least < 1 or (most or least) < least:
        raise ConfigError(f"{role} workers: at least one, and {least} to {most or least} of them is no range")
    return least, most or least


@dataclass(eq=False)
class Worker:
    """A process, and what it has been given to do, by name."""

    role: str
    index: int
    process: Process
    started: float = field(default_factory=time.monotonic)
    host: str = "a host not heard of yet"
    has_come: bool = False
    jobs: dict[str, Any] = field(default_factory=dict)
    outbox: queue.SimpleQueue[tuple[str, bytes, dict[str, Any]] | None] = field(default_factory=queue.SimpleQueue)
    threads: list[threading.Thread] = field(default_factory=list)
    failure: str = ""
    #: Whether it has shown that workers can work here.
    is_ready: bool = False
    is_leaving: bool = False

    def __str__(self) -> str:
        return f"{self.role} worker {self.index} (pid {self.process.pid} on {self.host})"


class Pool:
    """Worker processes of one role.

    Nothing here waits for a worker: each has a thread that sends and one that listens, and what they hear stands in
    `events`, as (worker, message), or (worker, None) for its end. Any thread may call `scale` while another works.

    Args:
        transport: see `Channel`; for workers that come by TCP always "queue".
        launch: starts a process.
        host: this machine's name, for workers that come by TCP; None: they inherit a socket, or, if this run stands on
            a Ray cluster of several nodes, are spread over those.
        least, most: workers between which `fit` chooses.
    """

    role: ClassVar[str]
    #: MODULE:CLASS of what the processes run; see `verl.workers.process`.
    target: ClassVar[str]
    #: GPUs that a worker takes of a Ray cluster.
    gpus = 0

    def __init__(
        self,
        least: int,
        most: int | None = None,
        *,
        transport: str = "shared_memory",
        launch: Callable[[Sequence[str], Mapping[str, str], Sequence[int]], Process] = launch,
        host: str | None = None,
    ) -> None:
        self.least, self.most = check_range(self.role, least, most)
        self.transport = transport
        self.events: queue.SimpleQueue[tuple[Worker, Message | None]] = queue.SimpleQueue()
        self._launch, self._host = launch, host
        self.lock = threading.RLock()
        self._workers: list[Worker] = []
        self._next = 0
        self._deaths, self._death = 0, 0.0
        self._ample_since, self._needed = 0.0, 0
        _POOLS.add(self)

    @property
    def workers(self) -> list[Worker]:
        """Those that are to stay."""
        return [worker for worker in self._workers if not worker.is_leaving]

    @property
    def size(self) -> int:
        return len(self.workers)

    @property
    def pids(self) -> list[int]:
        """Of the workers' processes."""
        return [worker.process.pid for worker in self.workers]

    def scale(self, size: int) -> None:
        """Have so many workers from now on.

        Raises:
            ConfigError: fewer than one.
        """
        if size < 1:
            raise ConfigError(f"there must be at least one {self.role} worker, not {size}")
        with self.lock:
            self._ample_since, self._needed = time.monotonic(), 0
            for worker in self.workers[size:]:
                worker.is_leaving = True
                self._send(worker, "stop")
            while self.size < size:
                self._workers.append(self._start())

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
        """Have all workers write the stacks of their threads to their stderr."""
        for worker in [worker for worker in self._workers if worker.has_come]:
            logger.error("%s: the stacks of its threads follow on its stderr", worker)
            with suppress(OSError):
                worker.process.send_signal(signal.SIGUSR1)
            time.sleep(0.1)  # one after the other, to be read

    def close(self) -> None:
        """End all workers, now."""
        with self.lock:
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.outbox.put(None)
            _reap(worker.process)
        until = time.monotonic() + _END_DEADLINE
        for worker in workers:
            for thread in worker.threads:
                thread.join(max(0.0, until - time.monotonic()))

    def _greet(self, worker: Worker) -> None:
        """Tell a new worker what it must know."""
        raise NotImplementedError

    def _send(self, worker: Worker, kind: str, data: bytes = b"", **head: Any) -> None:
        worker.outbox.put((kind, data, head))

    def _start(self, tries: int = 1) -> Worker:
        """A new worker. What this machine lacks for a moment (files, memory) is tried again, as a death is.

        Raises:
            ClusterError: no process can be started.
        """
        try:
            return self._spawn()
        except OSError as error:
            what = f"{self.role} worker {self._next} cannot be started: {error}"
            if tries == MAX_DEATHS:
                raise ClusterError(
                    f"{what}, {tries} times in a row: are there memory, processes (ulimit -u) and open files (ulimit "
                    "-n) enough for it?"
                ) from error
        logger.warning("%s; it is tried again", what)
        time.sleep(tries)
        return self._start(tries + 1)

    def _spawn(self) -> Worker:
        command = [sys.executable, "-m", "verl.workers.process", self.target, f"{self.role} worker {self._next}"]
        env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        launch, host, transport = self._launch, self._host, self.transport
        if host is None and (ray := _ray()) is not None and (host := ray.address()) is not None:
            launch = partial(ray.launch, gpus=self.gpus)
        if host is None:
            ours, theirs = socket.socketpair()
            bound_sends(ours)
            with theirs:
                fd = theirs.fileno()
                process = launch([*command, f"fd:{fd}", transport], env, [fd])
            connect: Callable[[], Connection] = lambda: Connection(ours.detach())  # noqa: E731
        else:
            transport = "queue"  # memory is not shared between machines
            door = Door(host)
            process = launch([*command, door.address, transport], {**env, TOKEN: door.token}, [])
            connect = partial(door.admit, lambda: process.poll() is None, START_DEADLINE)
        worker = Worker(self.role, self._next, process)
        self._next += 1
        self._greet(worker)
        self._run(worker, self._talk, connect, transport)
        return worker

    def _run(self, worker: Worker, function: Callable[..., None], *args: Any) -> None:
        name = f"{self.role}-{worker.index}"
        worker.threads.append(threading.Thread(target=function, args=(worker, *args), name=name, daemon=True))
        worker.threads[-1].start()

    def _talk(self, worker: Worker, connect: Callable[[], Connection], transport: str) -> None:
        """Send what stands in a worker's outbox."""
        try:
            channel = Channel(connect(), transport)
        except ConnectionError:
            self.events.put((worker, None))
            return
        self._run(worker, self._listen, channel)
        while (message := worker.outbox.get()) is not None:
            kind, data, head = message
            try:
                channel.send(kind, data, **head)
            except OSError:  # gone, or silent for SEND_DEADLINE; either way its end is what comes next from it
                worker.process.kill()
        channel.close()

    def _listen(self, worker: Worker, channel: Channel) -> None:
        """Take what a worker sends, so that it never waits for a driver that trains."""
        try:
            worker.host, worker.has_come = channel.receive().head["host"], True
            while True:
                message = channel.receive()
                if message.kind == "failed":
                    worker.failure = message.head["text"]
                else:
                    self.events.put((worker, message))
        except (EOFError, OSError):
            self.events.put((worker, None))

    def _bury(self, worker: Worker) -> str:
        """How a worker ended; another one takes its place, unless it was to leave.

        Raises:
            ClusterError: it failed (with its own traceback), or workers die again and again.
        """
        self._workers.remove(worker)
        worker.outbox.put(None)
        code = _reap(worker.process)
        how = "does not end" if code is None else f"ended with exit status {code}"
        if worker.is_leaving:
            return how
        if worker.failure:
            raise self._error(f"{worker} failed:\n{worker.failure}")
        if not worker.is_ready and worker.started >= self._death:  # those that died together are one death
            self._deaths, self._death = self._deaths + 1, time.monotonic()
        if self._deaths >= MAX_DEATHS:
            raise ClusterError(f"{worker} {how}, the {self._deaths}th in a row: is there memory enough for it?")
        logger.warning("%s %s; another one takes its place", worker, how)
        self._workers.append(self._start())
        return how

    def _error(self, text: str) -> Exception:
        return ClusterError(text)


def _ray() -> Any:
    """`verl.controller.ray_process`, if this run stands on a Ray cluster: one that this process is connected to, or the
    one at `RAY_ADDRESS`."""
    ray = sys.modules.get("ray")
    if not os.environ.get("RAY_ADDRESS") and (ray is None or not ray.is_initialized()):
        return None
    try:
        from verl.controller import ray_process
    except ImportError as error:
        raise ConfigError("RAY_ADDRESS is set, and Ray is not installed: pip install 'verl[ray]'") from error
    return ray_process


def _reap(process: Process) -> int | None:
    process.kill()
    try:
        return process.wait(_END_DEADLINE)
    except subprocess.TimeoutExpired:
        return None
