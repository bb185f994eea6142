"""The driver's side of standalone rollout workers."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

from verl._host.ray_session import START_DEADLINE, connect
from verl.batch import Batch
from verl.cluster.ray.pool import Pool, Worker
from verl.errors import ClusterError, ConfigError, RolloutError, nearest
from verl.weights.shard import Shard, in_buckets
from verl.workers.standalone import EngineRecipe, Finished, StandaloneWorker, Weights

#: How finished samples come to the driver.
Transport = Literal["queue", "shared_memory"]
#: Seconds between two looks at whether a pool with a queue was closed.
_TICK = 1.0


@dataclass(frozen=True)
class Lost:
    """Groups whose worker is gone."""

    groups: list[str]
    reason: str


class RolloutPool(Pool):
    """Rollout workers in processes of their own.

    Each gets the weights before the prompts that are sent after them, so that a group never begins under older
    weights than those its driver has published. Workers that `scale` adds get the newest weights; the groups of those
    that it ends are `Lost`.

    Args:
        recipe: of a worker's engine.
        size: workers at first, and at least.
        most: workers at most; see `fit`.
        transport: finished samples come through Ray's object store ("shared_memory") or a queue of Ray ("queue"),
            with the same results.

    Raises:
        ConfigError: there is no such transport, or Ray is not installed.
        ClusterError: see `cluster.connect`.
    """

    role = "rollout"
    worker_class = StandaloneWorker
    error_class = RolloutError
    concurrency_groups = {"inbox": 1}  # noqa: RUF012

    def __init__(
        self, recipe: EngineRecipe, size: int, most: int | None = None, *, transport: str = "shared_memory"
    ) -> None:
        if transport not in get_args(Transport):
            raise ConfigError(f"there is no transport '{transport}': {nearest(transport, get_args(Transport))}")
        super().__init__(size, most)
        ray = connect()
        self._recipe = ray.put(recipe)
        self.gpus = int(recipe.device.startswith("cuda"))
        #: The newest that were published.
        self.weights: Weights | None = None
        self._lost: list[str] = []
        self._queue: Any = None
        if transport == "queue":
            from ray.util.queue import Queue

            self._queue = Queue(actor_options={"num_cpus": 0})
            threading.Thread(target=self._drain, name="rollout-queue", daemon=True).start()
        self.scale(size)

    def publish(self, version: int, shards: Iterable[Shard]) -> None:
        """Send new weights to all workers; samples in progress go on with them.

        Args:
            version: of the policy.
            shards: a stream of whole weights.
        """
        import ray

        parts = tuple(ray.put(part) for part in in_buckets(shards))
        with self.lock:
            self.weights = Weights(version, parts)
            for worker in self.workers:
                self._post(worker, self.weights)

    def submit(self, group: str, rows: Batch, params: Mapping[str, Any]) -> None:
        """Submit a group to the worker with the fewest groups."""
        with self.lock:
            worker = min(self.workers, key=lambda worker: (len(worker.jobs), worker.index))
            worker.jobs[group] = None
            self._post(worker, (group, rows, dict(params)))

    def event(self, deadline: float) -> Finished | Lost:
        """Wait for the next group that is finished or lost.

        Args:
            deadline: seconds for workers to finish a group, once their engines are made. Making an engine may take as
                long, but at least `START_DEADLINE`.

        Raises:
            ClusterError: a deadline passed (the workers' stacks go to stderr), or workers die again and again.
            RolloutError: a worker's engine failed; with the worker's own traceback.
        """
        began = time.monotonic()
        with suppress(queue.Empty):
            while True:
                with self.lock:
                    start = max(START_DEADLINE, deadline)
                    waited = [worker for worker in self.workers if worker.jobs] or self.workers
                    ends = (w.started + start if w.ran is None else max(began, w.ran) + deadline for w in waited)
                    seconds = max(ends) - time.monotonic()
                if (event := self.poll(max(0.0, seconds))) is not None:
                    return event
        self.dump_stacks()
        starting = "" if any(worker.ran for worker in self.workers) else ", and none has made its engine"
        about = ", ".join(f"{worker}: {len(worker.jobs)} groups" for worker in self.workers)
        raise ClusterError(
            f"no rollout worker finished a group within {deadline:g} s{starting} ({about}); their stacks are on "
            "stderr. A longer deadline may be set"
        )

    def poll(self, seconds: float) -> Finished | Lost | None:
        """The groups that the next answer of a worker finished or lost; None if the answer is about something else.

        Raises:
            queue.Empty: no worker answered in time.
            ClusterError, RolloutError: see `event`.
        """
        if self._lost:
            with self.lock:
                lost, self._lost = self._lost, []
            return Lost(lost, "its worker was taken away")
        worker, name, answer = self.events.get(timeout=seconds)
        with self.lock:
            return self._take(worker, name, answer) if worker in self._workers else None

    def wake(self) -> None:
        """End the current `poll`, or the next one."""
        # No worker of this pool is None, so `poll` returns None.
        self.events.put((None, "", None))  # type: ignore[arg-type]

    def close(self) -> None:
        super().close()
        ended, self._queue = self._queue, None
        if ended is not None:
            ended.shutdown(force=True)

    def _take(self, worker: Worker, name: str, answer: Any) -> Finished | Lost | None:
        from ray.exceptions import RayError

        if isinstance(answer, RayError):
            how = self._replace_dead(worker, answer)
            return Lost(sorted(worker.jobs), f"{worker} {how}") if worker.jobs else None
        if isinstance(answer, Exception):
            raise answer
        if name == "start":
            worker.host, worker.node, worker.pid = answer
        elif answer is None:
            worker.ran = time.monotonic()
        if not isinstance(answer, Finished) or answer.group not in worker.jobs:
            return None
        self._deaths, worker.is_ready = 0, True
        del worker.jobs[answer.group]
        return answer

    def _begin(self, worker: Worker) -> None:
        stream = worker.actor.run.options(num_returns="streaming").remote(self._recipe, worker.index, self._queue)
        threading.Thread(
            target=self._listen, args=(worker, stream), name=f"rollout-{worker.index}", daemon=True
        ).start()
        if self.weights is not None:
            self._post(worker, self.weights)

    def _leave(self, worker: Worker) -> None:
        self._lost += sorted(worker.jobs)
        worker.jobs.clear()

    def _post(self, worker: Worker, order: Any) -> None:
        worker.actor.post.options(concurrency_group="inbox").remote(order)

    def _listen(self, worker: Worker, stream: Any) -> None:
        """Move a worker's results into `events`, so that it never waits for a driver that trains."""
        import ray

        try:
            for reference in stream:
                self.events.put((worker, "run", ray.get(reference, timeout=START_DEADLINE)))
        except ray.exceptions.RayError as error:
            self.events.put((worker, "run", error))

    def _drain(self) -> None:
        """Move the finished groups in the queue into `events`."""
        from ray.exceptions import RayError
        from ray.util.queue import Empty

        taken = self._queue
        while self._queue is not None:
            try:
                done = taken.get(timeout=_TICK)
            except Empty:
                continue
            except RayError as error:
                if self._queue is not None:
                    lost = ClusterError(f"the queue of finished samples is gone: {error}")
                    with self.lock:
                        for worker in self.workers[:1]:
                            self.events.put((worker, "queue", lost))
                return
            for worker in [worker for worker in self.workers if worker.index == done.worker]:
                self.events.put((worker, "run", done))
