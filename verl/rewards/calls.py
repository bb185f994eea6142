"""Calling a user's function under a deadline that it cannot break: in a thread that is abandoned when late. The
other way is a process that is killed: `verl.controller.rewards.RewardPool`.

`signal.alarm` is never used: it works in the main thread only and cannot interrupt compiled code.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import queue
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from verl.errors import RewardError
from verl.rewards.scores import Score, call_async, call_plain

#: Abandoned threads of one function that may be alive at the same time.
MAX_HUNG = 16
_ASYNC_CALLS = 64
_Job = tuple[concurrent.futures.Future[list[Score]], list[Any], dict[str, Any], int]


class Caller(Protocol):
    """Runs one call after the other in each of `slots` places.

    `width` is how many places there are, `max_late` how many late calls of one `score` are borne.
    """

    slots: threading.Semaphore
    width: int
    max_late: float

    async def call(self, args: list[Any], kwargs: dict[str, Any], rows: int, timeout: float) -> list[Score] | None:
        """Scores of `rows` samples, or None if there is no answer within `timeout` seconds."""

    def take_counts(self) -> dict[str, int]:
        """Processes it has ("workers"), and how many of them died since the last call of this ("deaths")."""

    def close(self) -> None:
        """End what it has started; the next call starts it anew."""


async def enter(slots: threading.Semaphore) -> None:
    """Wait for a place. Whoever holds one gives it back within its deadline; loops may differ, so this polls."""
    while not slots.acquire(blocking=False):
        await asyncio.sleep(0.002)


class ThreadCaller:
    """Calls in a daemon thread: one plain call at a time, or many async ones on the thread's own event loop.

    A call that does not answer in time and cannot be cancelled keeps its thread, which is abandoned; the next call
    gets a new one.
    """

    max_late = 3.0

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.name = name
        self._make = partial(_AsyncThread if is_async(function) else _PlainThread, function, name)
        self.width = _ASYNC_CALLS if is_async(function) else 1
        self.slots = threading.Semaphore(self.width)
        self._worker: _PlainThread | _AsyncThread | None = None
        self._abandoned: list[_PlainThread | _AsyncThread] = []

    async def call(self, args: list[Any], kwargs: dict[str, Any], rows: int, timeout: float) -> list[Score] | None:
        if self._worker is None:
            self._worker = self._make()
            weakref.finalize(self, self._worker.stop)
        worker = self._worker
        answer = asyncio.wrap_future(worker.submit(args, kwargs, rows))
        done, _ = await asyncio.wait({answer}, timeout=timeout)
        if done:
            return answer.result()
        answer.cancel()
        if await worker.stuck() and worker is self._worker:
            self._abandon(worker)
        return None

    def take_counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _abandon(self, worker: _PlainThread | _AsyncThread) -> None:
        worker.stop()
        self._worker = None
        self._abandoned = [old for old in (*self._abandoned, worker) if old.thread.is_alive()]
        if len(self._abandoned) >= MAX_HUNG:
            raise RewardError(
                f"reward function '{self.name}' hangs: {len(self._abandoned)} calls have not come back and cannot be "
                "stopped. Mend it, or give the Reward workers=1, a process that can be killed"
            )


class _PlainThread:
    """Makes calls one after the other, with no event loop running."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function = function
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name=f"reward {name}", daemon=True)
        self.thread.start()

    def submit(self, args: list[Any], kwargs: dict[str, Any], rows: int) -> concurrent.futures.Future[list[Score]]:
        future: concurrent.futures.Future[list[Score]] = concurrent.futures.Future()
        self.jobs.put((future, args, kwargs, rows))
        return future

    def _work(self) -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        while (job := self.jobs.get()) is not None:
            future, args, kwargs, rows = job
            scores = call_plain(self.function, args, kwargs, rows, loop)
            if future.set_running_or_notify_cancel():
                future.set_result(scores)
        loop.close()

    async def stuck(self) -> bool:
        return True

    def stop(self) -> None:
        self.jobs.put(None)


class _AsyncThread:
    """Makes calls side by side on a loop of its own, so that a function that blocks its loop blocks nobody else."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function = function
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name=f"reward {name}", daemon=True)
        self.thread.start()

    def submit(self, args: list[Any], kwargs: dict[str, Any], rows: int) -> concurrent.futures.Future[list[Score]]:
        return asyncio.run_coroutine_threadsafe(call_async(self.function, args, kwargs, rows), self.loop)

    async def stuck(self) -> bool:
        """Whether the loop is blocked: a cancelled call that awaits something is not."""
        pulse = threading.Event()
        self.loop.call_soon_threadsafe(pulse.set)
        end = time.monotonic() + 0.5
        while not pulse.is_set() and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return not pulse.is_set()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call gives something to await: of an async function, an object with an async `__call__`, a partial."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
