"""The standalone rollout workers of a run, seen from its driver."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.batch import Batch
from verl.controller.pool import Pool, Worker
from verl.errors import ClusterError, RolloutError
from verl.workers.channel import Message


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


class RolloutPool(Pool):
    """Rollout workers in processes of their own.

    Each gets the weights before the prompts that are sent after them, so that a group never begins under older
    weights than those its driver has published.

    Args:
        model: what a worker is told first: a head and bytes.
        size: workers at first, and at least.
        most: workers at most; see `fit`.
        **options: see `Pool`.
    """

    role = "rollout"
    target = "verl.workers.standalone:StandaloneWorker"

    def __init__(self, model: tuple[dict[str, Any], bytes], size: int, most: int | None = None, **options: Any) -> None:
        super().__init__(size, most, **options)
        self._model = model
        self.gpus = int(model[0]["device"].startswith("cuda"))
        self._weights: tuple[int, bytes] | None = None
        self._lost: list[str] = []
        self.scale(size)

    def scale(self, size: int) -> None:
        """Have so many workers from now on. New ones get the newest weights; the groups of those that leave are
        lost, and told by `event`."""
        with self.lock:
            super().scale(size)
            for worker in self._workers:
                if worker.is_leaving:
                    self._lost += sorted(worker.jobs)
                    worker.jobs.clear()

    def publish(self, version: int, weights: bytes) -> None:
        """New weights for all workers; what they are sampling goes on under them."""
        with self.lock:
            self._weights = (version, weights)
            for worker in self.workers:
                self._send(worker, "weights", weights, version=version)

    def submit(self, group: str, rows: Batch, params: Mapping[str, Any]) -> None:
        """Have a group sampled, by the worker that has fewest."""
        with self.lock:
            worker = min(self.workers, key=lambda worker: (len(worker.jobs), worker.index))
            worker.jobs[group] = None
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
                worker, message = self.events.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise self._stall(deadline) from None
            with self.lock:
                if (event := self._take(worker, message)) is not None:
                    return event
        with self.lock:
            lost, self._lost = self._lost, []
        return Lost(lost, "its worker was taken away")

    def _take(self, worker: Worker, message: Message | None) -> Finished | Lost | None:
        if message is None:
            how = self._bury(worker)
            return Lost(sorted(worker.jobs), f"{worker} {how}") if worker.jobs else None
        if worker.is_leaving:  # its groups have been given away
            return None
        self._deaths, worker.is_ready = 0, True
        del worker.jobs[message.head["group"]]
        busy = [(start, end) for start, end in message.head["busy"]]
        return Finished(message.head["group"], Batch.from_ipc(message.data), worker.index, busy)

    def _greet(self, worker: Worker) -> None:
        head, data = self._model
        self._send(worker, "model", data, **head)
        if self._weights is not None:
            self._send(worker, "weights", self._weights[1], version=self._weights[0])

    def _stall(self, deadline: float) -> ClusterError:
        self.dump_stacks()
        about = ", ".join(f"{worker}: {len(worker.jobs)} groups" for worker in self.workers)
        return ClusterError(
            f"no rollout worker finished a group within {deadline:g} s ({about}); their stacks are on stderr. A longer "
            "deadline may be set"
        )

    def _error(self, text: str) -> Exception:
        return RolloutError(text)
