"""The standalone rollout workers of a run, seen from its driver: started, fed, replaced when they die, scaled."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from verl.batch import Batch
from verl.errors import ClusterError, RolloutError
from verl.workers.channel import Channel, Message

logger = logging.getLogger(__name__)

#: Deaths in a row, without a finished group between them, after which the run ends.
MAX_DEATHS = 3
#: Seconds that a worker may leave a message unread between two of its steps, when the connection is full.
SEND_DEADLINE = 120


@dataclass(frozen=True)
class Finished:
    """A group that has come: its rows, and when its worker worked since it sent the last one."""

    group: str
    samples: Batch
    worker: int
    busy: list[tuple[float, float]]


@dataclass(frozen=True)
class Lost:
    """Groups whose worker is gone."""

    groups: list[str]
    reason: str


@dataclass(eq=False)
class _Worker:
    index: int
    process: subprocess.Popen[bytes]
    channel: Channel
    groups: set[str] = field(default_factory=set)
    failure: str = ""
    is_leaving: bool = False


class RolloutPool:
    """Rollout workers in processes of this machine.

    Each gets the weights before the prompts that are sent after them, so that a group never begins under older
    weights than those its driver has published.

    Args:
        model: what a worker is told first: a head and bytes.
        size: workers.
        transport: see `Channel`.
    """

    def __init__(self, model: tuple[dict[str, Any], bytes], size: int, transport: str = "shared_memory") -> None:
        self._model = model
        self._transport = transport
        self._weights: tuple[int, bytes] | None = None
        self._events: queue.SimpleQueue[tuple[_Worker, Message | None]] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._deaths = 0
        self._next = 0
        self._lost: list[str] = []
        self.scale(size)

    @property
    def size(self) -> int:
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        """Of the workers' processes."""
        return [worker.process.pid for worker in self._workers]

    def scale(self, size: int) -> None:
        """Have so many workers from now on. New ones get the newest weights; the groups of those that leave are
        lost, and told by `event`."""
        while len(self._workers) > size:
            worker = self._workers.pop()
            worker.is_leaving = True
            self._send(worker, "stop")
            self._lost += sorted(worker.groups)
            worker.groups.clear()
        while len(self._workers) < size:
            self._workers.append(self._start())

    def publish(self, version: int, weights: bytes) -> None:
        """New weights for all workers; what they are sampling goes on under them."""
        self._weights = (version, weights)
        for worker in self._workers:
            self._send(worker, "weights", weights, version=version)

    def submit(self, group: str, rows: Batch, params: Mapping[str, Any]) -> None:
        """Have a group sampled, by the worker that has fewest."""
        worker = min(self._workers, key=lambda worker: (len(worker.groups), worker.index))
        worker.groups.add(group)
        self._send(worker, "rollout", rows.to_ipc(), group=group, params=dict(params))

    def event(self, deadline: float) -> Finished | Lost:
        """What happens next.

        Raises:
            ClusterError: nothing within `deadline` seconds (the workers' stacks go to stderr), or workers die again
                and again.
            RolloutError: a worker's engine failed; with the worker's own traceback.
        """
        until = time.monotonic() + deadline
        while not self._lost:
            try:
                worker, message = self._events.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise self._stall(deadline) from None
            if worker.is_leaving:  # its groups have been given away
                if message is None:
                    worker.process.wait()
                    worker.channel.close()
                continue
            if message is None:
                return self._died(worker)
            if message.kind == "failed":
                worker.failure = message.head["text"]
            else:
                self._deaths = 0
                worker.groups.discard(message.head["group"])
                busy = [(start, end) for start, end in message.head["busy"]]
                return Finished(message.head["group"], Batch.from_ipc(message.data), worker.index, busy)
        lost, self._lost = self._lost, []
        return Lost(lost, "its worker was taken away")

    def close(self) -> None:
        """End all workers, now."""
        for worker in self._workers:
            worker.is_leaving = True
            worker.process.kill()
            worker.process.wait()
            worker.channel.close()
        self._workers = []

    def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_DEADLINE, 0))
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "verl.workers.standalone", str(theirs.fileno()), self._transport],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        worker = _Worker(self._next, process, Channel(Connection(ours.detach()), self._transport))
        self._next += 1
        threading.Thread(target=self._listen, args=(worker,), name=f"rollout-{worker.index}", daemon=True).start()
        head, data = self._model
        self._send(worker, "model", data, **head)
        if self._weights is not None:
            self._send(worker, "weights", self._weights[1], version=self._weights[0])
        return worker

    def _listen(self, worker: _Worker) -> None:
        """Take what a worker sends, so that it never waits for a driver that trains; its end is None."""
        try:
            while True:
                self._events.put((worker, worker.channel.receive()))
        except (EOFError, OSError):
            self._events.put((worker, None))

    def _send(self, worker: _Worker, kind: str, data: bytes = b"", **head: Any) -> None:
        try:
            worker.channel.send(kind, data, **head)
        except OSError:  # gone, or silent for SEND_DEADLINE; either way its end is what comes next from it
            worker.process.kill()

    def _died(self, worker: _Worker) -> Lost:
        self._workers.remove(worker)
        worker.process.kill()
        code = worker.process.wait()
        worker.channel.close()
        if worker.failure:
            raise RolloutError(f"rollout worker {worker.index} on {socket.gethostname()} failed:\n{worker.failure}")
        self._deaths += 1
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        reason = f"rollout worker {worker.index} (pid {worker.process.pid}) {how}"
        if self._deaths >= MAX_DEATHS:
            raise ClusterError(f"{reason}, the {self._deaths}th in a row: is there memory enough for its model?")
        logger.warning("%s; another one takes its place, %d groups begin anew", reason, len(worker.groups))
        self._workers.append(self._start())
        return Lost(sorted(worker.groups), reason)

    def _stall(self, deadline: float) -> ClusterError:
        for worker in self._workers:
            worker.process.send_signal(signal.SIGUSR1)
        about = ", ".join(f"worker {w.index} (pid {w.process.pid}): {len(w.groups)} groups" for w in self._workers)
        return ClusterError(
            f"no rollout worker finished a group within {deadline:g} s ({about}); their stacks are on stderr. A longer "
            "deadline may be set"
        )
