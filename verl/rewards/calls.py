"""Calls of a user's function with a deadline that it cannot break: in a thread, which is left behind when it is late.
The alternative is a process, which is killed: `verl.rewards.processes`, or several: `verl.controller.rewards`.

`signal.alarm` is never used: it works in the main thread only and cannot interrupt compiled code.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from verl.errors import RewardError
from verl.rewards.last_words import computing
from verl.rewards.scores import Score, call_async, call_plain

#: Threads of one function that were left behind and may be alive at the same time.
MAX_HUNG = 16
ASYNC_CALLS = 64
PULSE_SECONDS = 0.5


class Slots:
    """Lets so many in at a time, in the order in which they come, whatever event loops they wait on."""

    def __init__(self, width: int) -> None:
        self._free = width
        self._waiting: deque[concurrent.futures.Future[None]] = deque()
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn: concurrent.futures.Future[None] = concurrent.futures.Future()
            self._waiting.append(turn)
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if not turn.cancel():  # its turn had come already
                self._leave()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._free += 1


class Caller(Protocol):
    """Makes at most `width` calls at a time, each in one of its `slots`.

    After `max_late` late calls, a `score` makes no further ones.
    """

    slots: Slots
    width: int
    max_late: float

    async def call(self, args: list[Any], kwargs: dict[str, Any], rows: int, timeout: float) -> list[Score] | None:
        """Scores of `rows` samples, or None if there is no answer within `timeout` seconds."""

    def take_counts(self) -> dict[str, int]:
        """Its processes ("workers"), and how many of them died since the last call of this ("deaths")."""

    def close(self) -> None:
        """End what it has started; the next call starts it again."""


class FunctionCaller:
    """Calls of a plain function are one after the other, of an async one together on one event loop."""

    max_late = 3.0

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function, self.name = function, name
        self._is_async = is_async(function)
        self.width = ASYNC_CALLS if self._is_async else 1
        self.slots = Slots(self.width)


class ThreadCaller(FunctionCaller):
    """Calls in daemon threads."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__(function, name)
        self._loop: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None
        self._hung: list[threading.Thread] = []

    async def call(self, args: list[Any], kwargs: dict[str, Any], rows: int, timeout: float) -> list[Score] | None:
        start = self._start_async if self._is_async else self._start_plain
        with computing(self.name, timeout):
            future, thread = start(args, kwargs, rows)
            answer = asyncio.wrap_future(future)
            done, _ = await asyncio.wait({answer}, timeout=timeout)
        if done:
            return answer.result()
        answer.cancel()
        if not self._is_async or await self._is_blocked(thread):
            self._leave_behind(thread)
        return None

    def take_counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        if self._loop is not None:
            self._loop[0].call_soon_threadsafe(self._loop[0].stop)
            self._loop = None

    def _start_plain(self, *call: Any) -> tuple[concurrent.futures.Future[list[Score]], threading.Thread]:
        future: concurrent.futures.Future[list[Score]] = concurrent.futures.Future()
        thread = threading.Thread(target=_call, args=(future, self.function, *call), name=f"reward {self.name}")
        thread.daemon = True
        thread.start()
        return future, thread

    def _start_async(self, *call: Any) -> tuple[concurrent.futures.Future[list[Score]], threading.Thread]:
        if self._loop is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name=f"reward {self.name}", daemon=True)
            thread.start()
            weakref.finalize(self, loop.call_soon_threadsafe, loop.stop)
            self._loop = loop, thread
        return asyncio.run_coroutine_threadsafe(call_async(self.function, *call), self._loop[0]), self._loop[1]

    async def _is_blocked(self, thread: threading.Thread) -> bool:
        """Whether this thread's loop does not run: a cancelled call that awaits something does not block it."""
        if self._loop is None or self._loop[1] is not thread:
            return False
        pulse: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop[0].call_soon_threadsafe(pulse.set_result, None)
        await asyncio.wait({asyncio.wrap_future(pulse)}, timeout=PULSE_SECONDS)
        return not pulse.done()

    def _leave_behind(self, thread: threading.Thread) -> None:
        if thread not in self._hung:
            self.close()
        self._hung = [old for old in {*self._hung, thread} if old.is_alive()]
        if len(self._hung) >= MAX_HUNG:
            raise RewardError(
                f"reward function '{self.name}' hangs: {len(self._hung)} calls have not returned and cannot be "
                "stopped. Fix it, or leave out process=False, so that it runs in a process that can be killed"
            )


def _call(
    future: concurrent.futures.Future[list[Score]],
    function: Callable[..., Any],
    args: list[Any],
    kwargs: dict[str, Any],
    rows: int,
) -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    scores = call_plain(function, args, kwargs, rows, loop)
    if future.set_running_or_notify_cancel():
        future.set_result(scores)
    loop.close()


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call gives something to await: of an async function, an object with an async `__call__`, a partial."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
