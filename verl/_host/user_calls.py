"""Calls of the user's code: each has a deadline, and a late one is named by its line.

A plain function is called in a daemon thread, which is left behind when it is late; an async one on an event loop that
serves nothing else. What holds the interpreter (a regular expression, a huge power, a sleep in C) stops all threads of
this process, its signals too: another process, `verl._host.watchdog`, ends it then, by name.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import faulthandler
import inspect
import logging
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import IO, Any, TypeVar

from verl._host import watchdog
from verl._host.user_code import NOT_THE_USERS, line_of

T = TypeVar("T")
logger = logging.getLogger(__name__)

#: Seconds for a call where no setting says another number.
DEADLINE = 1800.0
#: Threads of one function that were left behind and may be alive at the same time.
MAX_HUNG = 16
#: Seconds after which the line of an async function is logged that neither ends nor awaits.
BLOCKS = 1.0
_BLOCKING = "all other calls on it wait. Let it await (an async client, asyncio.to_thread), or make it a plain function"
#: Seconds that cancelled code has to close what it has open.
_GRACE = 1.0


class LateError(Exception):
    """A user's code exceeded its deadline. The text says which, and where the code of `thread` is."""

    def __init__(self, seconds: float | None, thread: threading.Thread | None = None) -> None:
        self.where = line_of(thread.ident or 0) if thread is not None else None
        super().__init__(f"took longer than {seconds:g} s{f' (it was at {self.where})' if self.where else ''}")


class HungError(Exception):
    """`MAX_HUNG` calls of a function have not returned: it is not called any more."""


class _Watch:
    """The calls that are under way in this process, in a table that the watchdog reads."""

    def __init__(self) -> None:
        self._steps: set[tuple[str, float, int]] = set()  # of async functions: name, begin, thread
        self._table: mmap.mmap | None = None
        self._free = [*range(watchdog.CALLS, 0, -1)]
        self._lock = threading.Lock()
        self.signals = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._files: tuple[IO[bytes], ...] = ()
        self._blocking: set[tuple[str, str | None]] = set()

    @contextmanager
    def watched(self, what: str, seconds: float, *, is_step: bool = False) -> Iterator[None]:
        """Inside, this thread calls the user's code. If that holds the interpreter for longer than `seconds`, or ends
        the process, the watchdog names it. Also a decorator of plain functions."""
        table, row = self._table or self.start(), None
        with suppress(IndexError):  # calls beyond the last row are not seen from outside
            row = self._free.pop()
        step = what, began, thread = what, time.monotonic(), threading.get_ident()
        if row is not None:
            numbers = began + seconds, began, threading.get_native_id(), thread
            watchdog.CALL.pack_into(table, row * watchdog.CALL.size, *numbers, what.encode(errors="replace"))
        if is_step:
            self._steps.add(step)
        try:
            yield
        finally:
            self._steps.discard(step)
            if row is not None and self._table is table:  # and no fork or end since
                watchdog.CALL.pack_into(table, row * watchdog.CALL.size, 0.0, 0.0, 0, 0, b"")
                self._free.append(row)

    def start(self) -> mmap.mmap:
        with self._lock:
            if self._table is None:
                self._files = _memory(), _memory()  # the table and the stacks, open as long as the process lives
                self._files[0].truncate(watchdog.SIZE)
                table = mmap.mmap(self._files[0].fileno(), watchdog.SIZE)
                if os.name == "posix":
                    self._start_watchdog()
                threading.Thread(target=self._beat, args=(table,), name="verl-user-calls", daemon=True).start()
                self._table = table
            return self._table

    def _start_watchdog(self) -> None:
        reads, self.signals = os.pipe()
        os.set_blocking(self.signals, False)
        faulthandler.register(watchdog.DUMP, self._files[1])
        fds = (self._files[0].fileno(), reads, self._files[1].fileno())
        command = [sys.executable, "-I", "-S", watchdog.__file__, *map(str, (os.getpid(), *fds)), *NOT_THE_USERS]
        null = subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(command, pass_fds=fds, stdin=null, stdout=null, start_new_session=True)
        except OSError as error:
            logger.warning("what holds the interpreter beyond its deadline cannot be ended: %s", error)
        finally:
            os.close(reads)

    def _beat(self, table: mmap.mmap) -> None:
        while True:
            watchdog.BEAT.pack_into(table, 0, time.monotonic())
            for what, began, thread in list(self._steps):
                where = line_of(thread) if time.monotonic() - began > BLOCKS else None
                if time.monotonic() - began > BLOCKS and (what, where) not in self._blocking:
                    self._blocking.add((what, where))
                    text = f"{what} has held its event loop for {BLOCKS:g} s{f' ({where})' if where else ''}"
                    logger.warning("%s: %s", text, _BLOCKING)
            time.sleep(watchdog.TICK)

    def hear_signals(self) -> None:
        """From the main thread: let Ctrl-C and SIGTERM end this process also while a call holds the interpreter, unless
        something else in this process hears signals."""
        if threading.current_thread() is threading.main_thread() and os.name == "posix":
            self.start()
            before = signal.set_wakeup_fd(self.signals, warn_on_full_buffer=False)
            if before not in (-1, self.signals):
                signal.set_wakeup_fd(before)

    def close(self) -> None:
        """Note that this process ends deliberately, so that the watchdog blames no call."""
        if self._table is not None and self._process is not None:
            watchdog.HEAD.pack_into(self._table, 0, time.monotonic(), 1)
            self.leave()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)

    def leave(self) -> None:
        """Detach from the watchdog."""
        with suppress(ValueError):  # another thread than the main one
            signal.set_wakeup_fd(-1)
        with suppress(OSError):
            os.close(self.signals)
        self.signals, self._table = -1, None


def _memory() -> IO[bytes]:
    """A file in memory, or else a temporary one."""
    return open(os.memfd_create("verl"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


_watch = _Watch()
watched, hear_signals, ends = _watch.watched, _watch.hear_signals, _watch.close


def ordinary(error: BaseException) -> Exception:
    """The error, or another one that a future may hold and an event loop survives: `SystemExit` and
    `KeyboardInterrupt` end a loop, no future takes `StopIteration`, and a cancellation is taken for its own."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | concurrent.futures.CancelledError):
        return error
    raisable = RuntimeError(repr(error))
    raisable.__cause__ = error
    return raisable


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call gives something to await: of an async function, an object with an async `__call__`, a partial."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def is_users(function: Callable[..., Any]) -> bool:
    """Whether a function, or the class of an object that is called, is not of this package."""
    while isinstance(function, partial):
        function = function.func
    kind = function if inspect.isroutine(function) else type(function)
    return not f"{kind.__module__}.".startswith("verl.")


async def within(work: Awaitable[T], seconds: float | None) -> T:
    """Await work on the caller's event loop, with a deadline.

    Raises:
        LateError: it was not done in time, and was cancelled.
        Exception: its own; a RuntimeError if it exits or cancels itself.
    """

    async def without_exit() -> T:
        try:
            return await work
        except (KeyboardInterrupt, SystemExit) as error:
            raise ordinary(error) from error

    task = asyncio.ensure_future(without_exit())
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise LateError(seconds)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=_GRACE)
    if task.cancelled():
        raise RuntimeError("it cancelled itself")
    return task.result()


class Running(Future[T]):
    """A call of a plain function, which begins when this is made, in a daemon thread: a hung one does not keep the
    process from ending.

    Args:
        seconds: see `in_time`.

    Attributes:
        is_left: whether nobody waits for it any more.
    """

    def __init__(
        self, function: Callable[..., T], *args: Any, name: str = "verl-beside", seconds: float = DEADLINE
    ) -> None:
        super().__init__()
        self.seconds, self.until, self.is_left = seconds, time.monotonic() + seconds, False
        self.thread = threading.Thread(target=self._run, args=(function, args), name=name, daemon=True)
        self.thread.start()

    def _run(self, function: Callable[..., T], args: tuple[Any, ...]) -> None:
        try:
            self.set_result(function(*args))
        except BaseException as error:  # sys.exit() in a user's function is an error like any other
            self.set_exception(ordinary(error))

    def in_time(self) -> T:
        """Its result. Raises LateError at its deadline; its own error, and a KeyboardInterrupt that it raised."""
        concurrent.futures.wait([self], max(0.0, self.until - time.monotonic()))
        if not self.done():
            self.is_left = True
            raise LateError(self.seconds, self.thread)
        if isinstance(cause := getattr(self.exception(), "__cause__", None), KeyboardInterrupt):
            raise cause from None
        return self.result()


class UserCode:
    """Calls functions of the user's. Those that do not return in time are left behind.

    Args:
        what: names them in messages.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._running: list[Running[Any]] = []
        self._lost: set[threading.Thread] = set()  # of loops that this code blocked

    async def call(self, seconds: float, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The result of a function, plain or async.

        Raises:
            LateError: it took longer than `seconds`.
            HungError: too many calls before it never returned.
            Exception: its own; a RuntimeError if it exits.
        """
        if is_async(function):
            return await self._await(seconds, partial(function, *args, **kwargs))

        running = self.begin(seconds, function, *args, **kwargs)
        done = asyncio.wrap_future(running)
        try:
            await asyncio.wait({done}, timeout=seconds)
        finally:
            running.is_left = not done.done()
        if running.is_left:
            raise LateError(seconds, running.thread)
        if inspect.isawaitable(result := done.result()):  # of a plain function around an async one
            return await self._await(seconds, lambda: awaited(result))
        return result

    async def _await(self, seconds: float, function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """The result of an async function; its time begins when its loop gets to it. All share one loop; where a
        function has blocked it, each further call of it has its own."""
        global _shared
        while True:
            self._check()
            if _shared is None or _shared.is_lost:
                _shared = _Loop()
            host = _Loop() if self._lost else _shared
            begun: list[tuple[float, asyncio.Task[Any]]] = []
            work = asyncio.run_coroutine_threadsafe(self._begin_async(begun, seconds, function), host.loop)
            done = asyncio.wrap_future(work)
            done.add_done_callback(lambda done: done.cancelled() or done.exception())  # of one that nobody waits for
            try:
                while not (done.done() or host.is_lost):
                    left = begun[0][0] - time.monotonic() if begun else watchdog.TICK
                    if left <= 0:
                        break
                    await asyncio.wait({done}, timeout=min(left, watchdog.TICK))
                if done.done():
                    return done.result()
                if begun:
                    raise LateError(seconds, host.thread)
            finally:
                if not (done.done() or host.is_lost):
                    # A moment to close what it has open. A loop that does not move in that time serves no other call.
                    moved: Future[None] = Future()
                    for _, task in begun:
                        host.loop.call_soon_threadsafe(task.cancel)
                    host.loop.call_soon_threadsafe(moved.set_result, None)
                    await asyncio.wait({done}, timeout=_GRACE)
                    host.is_lost |= not moved.done()
                if host.is_lost:
                    self._lost.add(host.thread)
                if host is not _shared:
                    host.loop.call_soon_threadsafe(host.loop.stop)

    async def _begin_async(self, begun: list[Any], seconds: float, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """On the loop of a call. Notes in `begun` its deadline and its task."""
        until = time.monotonic() + seconds
        begun.append((until, asyncio.current_task()))
        try:
            return await in_steps(function(), lambda: watched(self.what, until - time.monotonic(), is_step=True))
        except asyncio.CancelledError:
            raise RuntimeError("it cancelled itself") from None

    def run(self, seconds: float, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """The same of a plain function, for synchronous code."""
        return self.begin(seconds, function, *args, **kwargs).in_time()

    def begin(self, seconds: float, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Running[T]:
        """Begin a call of a plain function. Raises HungError."""
        self._check()
        call = watched(self.what, seconds)(partial(function, *args, **kwargs))
        self._running.append(running := Running(call, name=self.what, seconds=seconds))
        return running

    def _check(self) -> None:
        self._running = [running for running in self._running if not running.done()]
        left = [running.is_left for running in self._running] + [thread.is_alive() for thread in self._lost]
        if sum(left) >= MAX_HUNG:
            raise HungError(f"{MAX_HUNG} calls of {self.what} never returned, and cannot be stopped")


_shared: _Loop | None = None


async def awaited(work: Awaitable[T]) -> T:
    return await work


class _Loop:
    """An event loop in a thread of its own, for async functions of the user's."""

    def __init__(self) -> None:
        self.loop, self.is_lost = asyncio.new_event_loop(), False
        self.thread = threading.Thread(target=self.loop.run_forever, name="verl-user-loop", daemon=True)
        self.thread.start()


@types.coroutine
def in_steps(work: Coroutine[Any, Any, T], step: Callable[[], AbstractContextManager[Any]]) -> Generator[Any, Any, T]:
    """A coroutine each step of which, from one wait to the next, is within a context of its own."""
    thrown: BaseException | None = None
    while True:
        with step():
            try:
                waits = work.send(None) if thrown is None else work.throw(thrown)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            except (KeyboardInterrupt, SystemExit) as error:
                raise ordinary(error) from error
        thrown = None
        try:
            yield waits
        except GeneratorExit:
            work.close()
            raise
        except BaseException as error:
            thrown = error


def _after_fork() -> None:
    """Threads do not survive a fork: the child gets a watchdog of its own."""
    global _shared
    _watch.leave()
    _Watch.__init__(_watch)
    _shared = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(ends)
