"""The driver's side of reward workers: one queue of calls, each made by the first free worker."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl._base.checked import checked
from verl._base.durable import digest
from verl._base.record import Processes
from verl._host.ray_session import START_DEADLINE, import_ray
from verl._host.user_functions import split_spec, user_modules
from verl.cluster.ray.pool import Pool, Worker, kill
from verl.errors import ClusterError, ConfigError, RewardError
from verl.rewards.calls import Slots
from verl.rewards.scores import Call, Score, failure
from verl.workers.scorer import Scorer

#: Calls that may stand in the queue.
_MANY = 2**16
#: Seconds between two looks at deadlines and at the length of the queue.
_TICK = 0.1
#: Weight of the newest call in the mean of the seconds that a call takes.
_NEW = 0.1


@dataclass(eq=False)
class _Job:
    call: Call
    timeout: float
    future: concurrent.futures.Future[list[Score] | None] = field(default_factory=concurrent.futures.Future)
    until: float = 0.0
    has_lost_a_worker: bool = False

    def answer(self, scores: list[Score] | Exception | None) -> None:
        if self.future.done() or not self.future.set_running_or_notify_cancel():
            return
        if isinstance(scores, Exception):
            self.future.set_exception(scores)
        else:
            self.future.set_result(scores)


class RewardPool(Pool):
    """Calls a reward function in workers, one call at a time in each (a `Caller` of `FunctionReward`).

    The worker of a call that is late is killed. A call whose worker dies without being late is made once more, by
    another worker, since the fault need not be its own. The workers start at the first call, and again at the first
    after `close`.

    Args:
        source: the function, or "FILE.py:FUNCTION". One with a method `load` is loaded so in each worker, first.
        name: of the reward, for messages.
        workers: how many; `scale` changes it.
        max_workers: upper limit. Workers are added when more calls are pending than they finish in `backlog` seconds,
            and removed, down to `workers`, when they are not needed (`Pool.fit`).

    Attributes:
        backlog: seconds.

    Raises:
        ConfigError: the function cannot be sent to a process, or Ray is not installed.
    """

    role = "reward"
    worker_class = Scorer
    error_class = RewardError
    max_late = math.inf  # a late call costs a process, no thread that cannot be ended
    ends_late = True
    backlog = 2.0

    @checked
    def __init__(
        self, source: Callable[..., Any] | str, name: str, *, workers: Processes, max_workers: Processes | None = None
    ) -> None:
        super().__init__(workers, max_workers)
        self.name = name
        self.slots = Slots(_MANY)
        self._dead = 0
        self._function = _by_value(source, name)
        self._wanted = workers
        self._seconds = 0.0  # that a call takes, in the mean
        self._queue: deque[_Job] = deque()
        self._supervisor: threading.Thread | None = None

    async def call(self, call: Call, timeout: float) -> list[Score] | None:
        """The scores of its samples; one score if the call failed; None: no answer within `timeout` seconds since a
        worker began.

        Raises:
            RewardError: the function does not load in a worker; with the worker's own traceback.
            ClusterError: workers die again and again before they are ready.
        """
        job = _Job(call, timeout)
        with self.lock:
            if not self.workers:
                self.scale(self._wanted)
            self._queue.append(job)
            self._assign()
        return await asyncio.wrap_future(job.future)

    @checked
    def scale(self, size: Processes) -> None:
        """Set the number of workers. Those that leave finish their present call."""
        with self.lock:
            self._wanted = size
            super().scale(size)
            if self._supervisor is None:
                self._supervisor = threading.Thread(target=self._supervise, name=f"reward {self.name}", daemon=True)
                self._supervisor.start()

    def close(self) -> None:
        """End all workers, now; calls under way fail."""
        with self.lock:
            supervisor, self._supervisor = self._supervisor, None
            self._give_up(RewardError(f"reward '{self.name}' was closed while its samples were being scored"))
        if supervisor is not None:
            supervisor.join(_TICK * 10)

    def take_counts(self) -> dict[str, int]:
        """The number of workers, and of deaths since the previous call."""
        with self.lock:
            dead, self._dead = self._dead, 0
            return {"workers": self.size, "deaths": dead}

    def _supervise(self) -> None:
        """Handle answers, kill late workers, and assign calls to free ones."""
        while True:
            event = None
            with suppress(queue.Empty):
                event = self.events.get(timeout=_TICK)
            with self.lock:
                if self._supervisor is not threading.current_thread():
                    return
                try:
                    if event is not None and event[0] in self._workers:
                        self._take(*event)
                    self._expire()
                    under_way = len(self._queue) + sum(len(worker.jobs) for worker in self._workers)
                    self.fit(under_way * self._seconds, self.backlog)
                    self._assign()
                except Exception as error:  # any: nobody else would end the waits of others
                    self._supervisor = None  # the next call starts anew: the cause may have been mended by then
                    self._give_up(_named(error, self.name))
                    return

    def _take(self, worker: Worker, name: str, answer: Any) -> None:
        from ray.exceptions import RayError, RayTaskError

        job = worker.jobs.get(name)
        if isinstance(answer, RayTaskError) and job is not None:  # its arguments cannot be unpickled there
            answer = [failure(f"cannot be scored in a worker: {answer.cause}")], 0.0
        if isinstance(answer, RayError):
            self._died(worker, answer)
        elif isinstance(answer, Exception):
            raise answer
        elif name == "start":
            worker.host, worker.node, worker.pid = answer
        elif job is None:  # loaded, or alive
            self._deaths, worker.is_ready = 0, True
        else:
            scores, seconds = answer
            job.answer(scores)
            del worker.jobs[name]  # not before: if anything fails, each job stands where it is given up
            self._seconds += (seconds - self._seconds) * (_NEW if self._seconds else 1.0)
            if worker.is_leaving:
                self._end(worker)

    def _died(self, worker: Worker, error: Exception) -> None:
        jobs = [job for job in worker.jobs.values() if not job.future.done()]  # done: was late, or nobody waits for it
        self._queue.extendleft(jobs)
        self._dead += not worker.is_leaving
        how = self._replace_dead(worker, error)
        for job in jobs:
            if job.has_lost_a_worker:
                self._queue.remove(job)
                job.answer([failure(f"{worker} {how}")])
            job.has_lost_a_worker = True
        # Several may have died at once, and one that is idle shows it by an answer alone: none of them may get a job
        # that another has lost.
        for other in self.workers:
            if other.is_ready and not other.jobs:
                other.is_ready = False
                self._call(other, "ping", Scorer.ping)

    def _expire(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if not worker.is_ready and now - worker.started > START_DEADLINE:
                worker.started = math.inf  # its death is the next event of it
                kill(worker)
            for job in worker.jobs.values():
                if now > job.until:
                    job.until = math.inf
                    kill(worker)
                    job.answer(None)

    def _assign(self) -> None:
        for worker in self.workers:
            while self._queue and worker.is_ready and not worker.jobs and not worker.is_killed:
                job = self._queue.popleft()
                if not job.future.cancelled():
                    job.until = time.monotonic() + job.timeout
                    worker.jobs[str(id(job))] = job
                    self._call(worker, str(id(job)), Scorer.score, job.call)

    def _give_up(self, error: Exception) -> None:
        jobs = [*self._queue, *(job for worker in self._workers for job in worker.jobs.values())]
        self._queue.clear()
        try:
            super().close()
        finally:
            for job in jobs:
                job.answer(error)

    def _begin(self, worker: Worker) -> None:
        self._call(worker, "load", Scorer.load, *self._function)


def _named(error: Exception, name: str) -> Exception:
    """A pool's error with the reward's name, for its callers."""
    if isinstance(error, RewardError | ClusterError | ConfigError):
        return type(error)(f"reward '{name}': {error}")
    failure = ClusterError(f"reward '{name}': its workers cannot be kept: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _by_value(source: Callable[..., Any] | str, name: str) -> tuple[bytes, str, str]:
    """Serialize a function for a worker: as (b"", file and name, the file's digest), or as (pickle, "", ""). A module's
    function is pickled by name, one of the user's script (a closure, a function of `__main__`) by value."""
    cloudpickle = import_ray().cloudpickle
    if isinstance(source, str):
        path, function = split_spec(source)
        return b"", f"{Path(path).resolve()}:{function}", digest(path)
    for module in (module for name, module in user_modules.items() if sys.modules.get(name) is module):
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(source), "", ""
    except Exception as error:  # it raises whatever an object's own hooks do
        raise ConfigError(
            f"reward '{name}' cannot be sent to a worker process ({type(error).__name__}: {error}): give it as "
            "FILE.py:FUNCTION, or from a module of its own"
        ) from error
