"""Calls of a user's function with a deadline that it cannot break: in a thread, which is left behind when it is late.
The alternative is a process, which is killed: `verl.rewards.processes`, or several: `verl.roles.reward_pool`.

`signal.alarm` is never used: it works in the main thread only and cannot interrupt compiled code.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Protocol

from verl.rewards.generators import notes_here
from verl.rewards.scores import Call, Score, call_async, call_plain, failure
from verl.user_calls import is_async

ASYNC_CALLS = 64
PULSE_SECONDS = 0.5
#: First calls of an async function that are watched for random numbers, which takes half a millisecond.
_WATCHED = 32
#: Seconds for a function's `load`.
_START_SECONDS = 300.0


class Slots:
    """A FIFO semaphore that works across event loops."""

    def __init__(self, width: int) -> None:
        self._free = width
        self._waiting: deque[Future[None]] = deque()
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
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
        self._add(1)

    def _add(self, free: int) -> None:
        with self._lock:
            self._free += free
            while self._free and self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    self._free -= 1
                    turn.set_result(None)


class _Turn(Slots):
    """One at a time; a call that a user's function makes is part of its own turn."""

    async def __aenter__(self) -> None:
        if notes_here.get() is None:
            await super().__aenter__()

    async def __aexit__(self, *error: object) -> None:
        if notes_here.get() is None:
            await super().__aexit__()


#: Of plain functions in threads of this process, which share its random generators.
TURN = _Turn(1)


class Caller(Protocol):
    """Makes at most `width` calls at a time, each in one of its `slots`.

    After `max_late` late calls, a `score` makes no further ones.
    """

    slots: Slots
    width: int
    max_late: float
    #: Whether a late call is ended. If not, it goes on beside those that follow.
    ends_late: bool

    async def call(self, call: Call, timeout: float) -> list[Score] | None:
        """The scores of its samples; one score if the call failed for all of them; None if there is no answer within
        `timeout` seconds."""

    def take_counts(self) -> dict[str, int]:
        """The number of its processes ("workers"), and of those that died since the last call ("deaths")."""

    def close(self) -> None:
        """End what it has started; the next call starts it again."""


class Host:
    """Where a function is called: a thread or a process. Requests have numbers, by which they are answered; number 0
    is answered when it is ready for calls."""

    def __init__(self) -> None:
        self.ready: Future[list[Score] | None] = Future()
        self._answers: dict[int, Future[list[Score] | None]] = {0: self.ready}

    def send(self, number: int, *request: Any) -> None:
        """Give it a `Call`, or the number of a call to cancel; without waiting for it."""
        raise NotImplementedError

    def end(self) -> None:
        """End it, or let it end once its call returns."""
        raise NotImplementedError

    def answer(self, number: int, scores: list[Score] | None) -> None:
        """Pass on the answer to a request; None: the host has died."""
        future = self._answers.pop(number, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(scores)

    async def ask(self, seconds: float, number: int, *request: Any) -> asyncio.Future[list[Score] | None]:
        """The answer to a request, or cancelled if it does not come in time."""
        answer = asyncio.wrap_future(self._answers.setdefault(number, Future()))
        try:
            self.send(number, *request)
            await asyncio.wait({answer}, timeout=seconds)
            return answer
        finally:
            answer.cancel()


def serve(
    function: Callable[..., Any],
    is_awaited: bool,
    requests: Iterable[tuple[Any, ...]],
    answer: Callable[[int, list[Score]], None],
) -> None:
    """What a host does: make calls until there are no more requests. Plain functions are called one after the other in
    this thread, and no event loop runs meanwhile; calls of async ones are under way together."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    tasks: dict[int, asyncio.Task[None]] = {}

    async def score(number: int, call: Call) -> None:
        answer(number, await call_async(function, call, number <= _WATCHED))
        tasks.pop(number, None)

    def take(number: int, request: Call | int) -> None:
        if isinstance(request, Call):
            tasks[number] = loop.create_task(score(number, request))
            return
        if late := tasks.pop(request, None):  # it is the number of a call to cancel
            late.cancel()
        answer(number, [])

    def read() -> None:
        for request in requests:
            loop.call_soon_threadsafe(take, *request)
        loop.call_soon_threadsafe(loop.stop)

    answer(0, [])
    if is_awaited:
        threading.Thread(target=read, daemon=True).start()
        loop.run_forever()
    else:
        for number, call in requests:
            answer(number, call_plain(function, call, loop))
        loop.close()


class FunctionCaller:
    """Calls of a plain function are one after the other, of an async one together on one event loop. What the function
    keeps stays until a call is late or ends the host; then it begins anew."""

    max_late = 3.0
    ends_late = True

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function, self.name = function, name
        self.is_async = is_async(function)
        self.width = ASYNC_CALLS if self.is_async else 1
        self.slots = Slots(self.width)
        self._numbers = itertools.count(1)
        self._host: Host | None = None
        self._starting = threading.Lock()
        self._deaths = 0

    async def call(self, call: Call, timeout: float) -> list[Score] | None:
        for _ in range(1 + self.is_async):  # an async call may have ended by the fault of another
            with self._starting:
                host = self._host = self._host or self._start()
            await asyncio.wait({asyncio.wrap_future(host.ready)}, timeout=_START_SECONDS)
            answer = await host.ask(timeout, number := next(self._numbers), call)
            if answer.cancelled():
                # A host that still runs its event loop cancels the call, and says so.
                if not self.is_async or (await host.ask(PULSE_SECONDS, next(self._numbers), number)).cancelled():
                    self._leave(host)
                return None
            if (scores := answer.result()) is not None:
                return scores
            self._deaths += self._host is host  # each async call under way learns of it; the first counts it
            self._end(host)
        return [failure("its process died (the function ended it: os._exit, a crash, too much memory)")]

    def take_counts(self) -> dict[str, int]:
        deaths, self._deaths = self._deaths, 0
        return {"deaths": deaths}

    def close(self) -> None:
        if self._host is not None:
            self._end(self._host)

    def _start(self) -> Host:
        raise NotImplementedError

    def _end(self, host: Host) -> None:
        if self._host is host:
            self._host = None
            host.end()

    def _leave(self, host: Any) -> None:
        """End a host at which a call is late."""
        self._end(host)
