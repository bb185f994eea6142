"""Calls of a user's function in a process of its own, which is killed when it is late. It is forked, so nothing has to
be pickled to get there, and stays for the whole run."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import itertools
import json
import logging
import os
import pickle
import signal
import struct
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any, BinaryIO

from verl.rewards.calls import PULSE_SECONDS, FunctionCaller
from verl.rewards.scores import Score, call_async, call_plain, failure
from verl.sandbox.jail import die_with_parent

logger = logging.getLogger(__name__)
#: Seconds for a function's `load`.
_START_SECONDS = 300.0
#: Bytes above which the process gives back its copy of a tensor, so that training it copies nothing.
_LARGE = 1 << 20


@dataclass(eq=False)
class _Process:
    pid: int
    out: BinaryIO
    ready: concurrent.futures.Future[Any] = field(default_factory=concurrent.futures.Future)
    jobs: dict[int, concurrent.futures.Future[Any]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def kill(self) -> None:
        """With all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def answers(self, pipe: BinaryIO) -> None:
        """Pass on what it answers until it has ended."""
        with pipe:
            for line in pipe:
                number, *scores = json.loads(line)
                future = self.ready if number is None else self.jobs.pop(number, None)
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_result([Score(*score) for score in scores])
        self.kill()
        os.waitpid(self.pid, 0)
        for future in [self.ready, *self.jobs.values()]:
            if not future.done() and future.set_running_or_notify_cancel():
                future.set_result(None)

    def send(self, *message: Any) -> None:
        content = pickle.dumps(message)
        with self.lock, suppress(OSError):  # it has ended, and `answers` says so
            self.out.write(struct.pack("Q", len(content)) + content)
            self.out.flush()


class ProcessCaller(FunctionCaller):
    """Calls in one process. What the function keeps stays until a call is late or ends the process; then it begins
    anew."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__(function, name)
        self._numbers = itertools.count()
        self._process: _Process | None = None
        self._deaths = 0
        self._was_said = False

    async def call(self, args: list[Any], kwargs: dict[str, Any], rows: int, timeout: float) -> list[Score] | None:
        for is_last in (not self._is_async, True):  # an async call may have ended by the fault of another
            process = self._process or self._start()
            await asyncio.wait({asyncio.wrap_future(process.ready)}, timeout=_START_SECONDS)
            number = next(self._numbers)
            answer = asyncio.wrap_future(process.jobs.setdefault(number, concurrent.futures.Future()))
            sending = threading.Thread(target=process.send, args=(number, args, kwargs, rows), daemon=True)
            sending.start()  # a process that hangs does not read
            done, _ = await asyncio.wait({answer}, timeout=timeout)
            if not done:
                process.jobs.pop(number, None)
                if not self._is_async or not await self._cancels(process, number):
                    self._end(process)
                return None
            if (scores := answer.result()) is not None:
                return scores  # type: ignore[no-any-return]
            self._deaths += self._process is process
            self._end(process)
            if is_last:
                break
        return [failure("its process died (the function ended it: os._exit, a crash, too much memory)")] * rows

    def take_counts(self) -> dict[str, int]:
        deaths, self._deaths = self._deaths, 0
        return {"deaths": deaths}

    def close(self) -> None:
        if self._process is not None:
            self._end(self._process)

    def _end(self, process: _Process) -> None:
        if self._process is process:
            self._process = None
        process.kill()

    async def _cancels(self, process: _Process, number: int) -> bool:
        """Whether a process still runs its event loop, and so has cancelled a late call."""
        pulse = process.jobs.setdefault(pulse_number := next(self._numbers), concurrent.futures.Future())
        threading.Thread(target=process.send, args=(pulse_number, number), daemon=True).start()
        done, _ = await asyncio.wait({asyncio.wrap_future(pulse)}, timeout=PULSE_SECONDS)
        return bool(done)

    def _start(self) -> _Process:
        if not self._was_said:
            logger.info(
                "reward %s runs in a process of its own: what it changes in objects of the script is not seen here, "
                "nor there what the script changes from now on (process=False runs it in this process)",
                self.name,
            )
            self._was_said = True
        self._process = _forker().submit(_fork, self.function, self._is_async).result()
        return self._process


_forkers: dict[int, concurrent.futures.ThreadPoolExecutor] = {}


def _forker() -> concurrent.futures.ThreadPoolExecutor:
    """The thread that forks: one that stays, as the kernel ends a process with the thread that forked it."""
    return _forkers.setdefault(os.getpid(), concurrent.futures.ThreadPoolExecutor(1, "fork"))


def _fork(function: Callable[..., Any], is_awaited: bool) -> _Process:
    requests, out = os.pipe()
    answers, back = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # or the process may print what waits there once more
            stream.flush()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the process uses none of theirs
        pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            _settle(parent)
            os.close(out)
            os.close(answers)
            _serve(function, is_awaited, os.fdopen(requests, "rb"), os.fdopen(back, "w"))
        os._exit(0)
    os.close(requests)
    os.close(back)
    process = _Process(pid, os.fdopen(out, "wb"))
    threading.Thread(target=process.answers, args=(os.fdopen(answers, "rb"),), daemon=True).start()
    return process


def _settle(parent: int) -> None:
    """Become a process of our own, which ends with its parent."""
    os.setsid()
    die_with_parent(parent)
    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, signal.SIG_DFL)
    with suppress(OSError):
        sys.stdin = open(os.devnull)  # noqa: SIM115  for as long as the process lives
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        for tensor in [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]:
            with suppress(Exception):  # what cannot be given back stays
                if tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() > _LARGE:
                    tensor.untyped_storage().resize_(0)


def _serve(function: Callable[..., Any], is_awaited: bool, requests: BinaryIO, back: Any) -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    getattr(function, "load", lambda: None)()
    tasks: dict[int, asyncio.Task[Any]] = {}

    def answer(number: int | None, scores: list[Score]) -> None:
        back.write(json.dumps([number, *map(astuple, scores)]) + "\n")
        back.flush()

    async def score(number: int, args: list[Any], kwargs: dict[str, Any], rows: int) -> None:
        answer(number, await call_async(function, args, kwargs, rows))

    def take(number: int, *call: Any) -> None:
        if len(call) == 1:  # a call to cancel
            tasks.pop(call[0]).cancel()
            answer(number, [])
        else:
            tasks[number] = loop.create_task(score(number, *call))

    answer(None, [])
    if is_awaited:
        reading = partial(lambda: [loop.call_soon_threadsafe(take, *request) for request in _requests(requests)])
        threading.Thread(target=reading, daemon=True).start()
        loop.run_forever()
    for number, args, kwargs, rows in _requests(requests):
        answer(number, call_plain(function, args, kwargs, rows, loop))


def _requests(pipe: BinaryIO) -> Iterator[tuple[Any, ...]]:
    while len(size := pipe.read(8)) == 8:
        yield pickle.loads(pipe.read(struct.unpack("Q", size)[0]))


def can_travel(function: Callable[..., Any]) -> bool:
    """Whether a function may run in a forked process: not where there is no fork to rely on, nor if it reaches a model
    or a tensor, whose memory is trained here, or is a device's."""
    return sys.platform == "linux" and not any(hasattr(value, "untyped_storage") or hasattr(value, "named_parameters")
                                               for value in _reached(function, 3))  # fmt: skip


def _reached(value: Any, depth: int) -> Iterator[Any]:
    """Objects that a function uses: its closure, globals, arguments and attributes, and what these hold."""
    yield value
    if depth == 0 or isinstance(value, types.ModuleType | type):
        return
    inner: list[Any] = []
    if isinstance(value, partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.MethodType):
        inner = [value.__func__, value.__self__]
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # it is empty
                inner.append(cell.cell_contents)
        inner += [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
    elif isinstance(value, list | tuple | set):
        inner = list(value)[:100]
    elif isinstance(value, dict):
        inner = list(value.values())[:100]
    elif hasattr(value, "__dict__"):
        inner = [*vars(value).values(), getattr(type(value), "__call__", None)]  # noqa: B004
    for one in inner:
        yield from _reached(one, depth - 1)
