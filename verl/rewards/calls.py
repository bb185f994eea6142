"""Calls of a user's function with a deadline that it cannot break: in a thread, which is left behind when it is late.
The alternative is a process, which is killed: `verl.rewards.processes`, or several: `verl.roles.reward_pool`.

`signal.alarm` is never used: it works in the main thread only and cannot interrupt compiled code.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from verl._host.user_calls import HungError, LateError, UserCode, is_async
from verl.errors import RewardError
from verl.rewards.generators import leave_calls, notes_here
from verl.rewards.scores import Call, Score, call_async, call_plain

ASYNC_CALLS = 64
#: First calls of an async function that are watched for random numbers, which takes half a millisecond.
WATCHED = 32


class Slots:
    """A FIFO semaphore that works across event loops.

    Args:
        nests: a call that a user's function makes is part of its own turn.
    """

    def __init__(self, width: int, *, nests: bool = False) -> None:
        self._free, self._nests = width, nests
        self._waiting: deque[Future[None]] = deque()
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        if self._nests and notes_here.get() is not None:
            return
        turn: Future[None] = Future()
        self._waiting.append(turn)
        self._add(0)
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if not turn.cancel():  # its turn had come already
                self._add(1)
            raise

    async def __aexit__(self, *error: object) -> None:
        self._add(not self._nests or notes_here.get() is None)

    def _add(self, free: int) -> None:
        with self._lock:
            self._free += free
            while self._free and self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    self._free -= 1
                    turn.set_result(None)


#: Of plain functions in threads of this process, which share its random generators.
TURN = Slots(1, nests=True)


class Caller(Protocol):
    """Makes calls, each in one of its `slots`.

    After `max_late` late calls, a `score` makes no further ones.
    """

    slots: Slots
    max_late: float = 3.0
    #: Whether a late call is ended. If not, it goes on beside those that follow.
    ends_late: bool = True

    async def call(self, call: Call, timeout: float) -> list[Score] | None:
        """The scores of its samples; one score if the call failed for all of them; None if there is no answer within
        `timeout` seconds."""

    def take_counts(self) -> dict[str, int]:
        """The number of its processes ("workers"), and of those that died since the last call ("deaths")."""
        return {}

    def close(self) -> None:
        """End what it has started; the next call starts it again."""


class FunctionCaller(Caller):
    """Calls of a plain function are one after the other, of an async one together on one event loop."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.name, self.is_async = name, is_async(function)
        # A caller lives until its reward is gone, and the object of a method may be that reward or have it: with a
        # reference neither would be freed.
        is_weak = inspect.ismethod(function) and hasattr(function.__self__, "__weakref__")
        self.get_function: Callable[[], Any] = weakref.WeakMethod(function) if is_weak else lambda: function
        self.slots = Slots(ASYNC_CALLS if self.is_async else 1)
        self._numbers = itertools.count(1)


class ThreadCaller(FunctionCaller):
    """Calls in daemon threads."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__(function, name)
        self.ends_late = self.is_async
        self.slots = self.slots if self.is_async else TURN
        self._code = UserCode(f"reward {name}")
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, call: Call, timeout: float) -> list[Score] | None:
        try:
            if self.is_async:
                is_watched = next(self._numbers) <= WATCHED
                return await self._code.call(timeout, call_async, self.get_function(), call, is_watched)  # type: ignore[no-any-return]
            return await self._code.call(timeout, self._call_plain, call)  # type: ignore[no-any-return]
        except LateError:
            if not self.is_async:
                leave_calls()
            return None
        except HungError as error:
            raise RewardError(
                f"reward function '{self.name}' hangs: {error}. Fix it, or leave out process=False, so that it runs in "
                "a process that can be killed"
            ) from None

    def _call_plain(self, call: Call) -> list[Score]:
        loop, self._loop = self._loop or asyncio.new_event_loop(), None  # a late call goes on with its own
        asyncio.set_event_loop(loop)
        scores = call_plain(self.get_function(), call, loop)
        self._loop = loop
        return scores

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None
