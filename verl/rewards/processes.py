"""Calls of a user's function in a process of its own, which is killed when it is late. It is forked, so nothing has to
be pickled to get there, and stays for the whole run."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from verl._host.user_functions import elsewhere, new_user_files
from verl.rewards import generators
from verl.rewards.calls import WATCHED, FunctionCaller
from verl.rewards.scores import Call, Score, call_async, call_plain, failure
from verl.sandbox.jail import die_with_parent

logger = logging.getLogger(__name__)
#: The thread of each process that forks: one that stays, as the kernel ends a process with the thread that forked it.
_forkers: dict[int, ThreadPoolExecutor] = {}
#: Seconds for a function's `load`, and in which a process that still runs its event loop answers.
_START_SECONDS, _PULSE_SECONDS = 300.0, 0.5


class _Process:
    """A fork of this process, made in a thread of `_forkers`. Requests have numbers, by which they are answered;
    number 0 is answered when it is ready for calls."""

    def __init__(self, function: Callable[..., Any], is_awaited: bool) -> None:
        self.ready: Future[list[Score] | None] = Future()
        self._answers: dict[int, Future[list[Score] | None]] = {0: self.ready}
        self._pipe, theirs = Pipe()
        self._lock = threading.Lock()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # or the process may print what waits there once more
                stream.flush()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the process uses none of theirs
            self.pid = os.fork()
        if self.pid == 0:
            with suppress(BaseException):
                _settle(parent)
                self._pipe.close()
                getattr(function, "load", lambda: None)()
                _serve(function, is_awaited, theirs)
            os._exit(0)
        theirs.close()
        threading.Thread(target=self._read, daemon=True).start()

    async def query(self, seconds: float, number: int, request: Call | int) -> asyncio.Future[list[Score] | None]:
        """The answer to a `Call`, or to the number of a call to cancel; cancelled if it does not come in time."""
        answer = asyncio.wrap_future(self._answers.setdefault(number, Future()))
        try:
            # A process that hangs does not read.
            threading.Thread(target=self._write, args=(number, request), daemon=True).start()
            await asyncio.wait({answer}, timeout=seconds)
            return answer
        finally:
            answer.cancel()

    def end(self) -> None:
        """Kill the process and all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _write(self, number: int, request: Call | int) -> None:
        try:
            with self._lock:
                self._pipe.send_bytes(pickle.dumps((number, request)))
        except OSError:  # it has ended
            self._answer(number, None)

    def _answer(self, number: int, scores: list[Score] | None) -> None:
        """Pass on the answer to a request; None: the process has died."""
        future = self._answers.pop(number, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(scores)

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, files, *scores = json.loads(self._pipe.recv_bytes())
                elsewhere.update(files)
                self._answer(number, [Score(*score) for score in scores])
        self.end()
        os.waitpid(self.pid, 0)
        for number in list(self._answers):
            self._answer(number, None)


class ProcessCaller(FunctionCaller):
    """Calls in one process. The function's state lives until a call is late or ends the process, which is then killed;
    the next call starts a new one."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__(function, name)
        self._process: _Process | None = None
        self._starting = threading.Lock()
        self._deaths = 0
        self._was_said = False

    async def call(self, call: Call, timeout: float) -> list[Score] | None:
        for _ in range(1 + self.is_async):  # an async call may have ended by the fault of another
            with self._starting:
                process = self._process = self._process or self._start()
            await asyncio.wait({asyncio.wrap_future(process.ready)}, timeout=_START_SECONDS)
            answer = await process.query(timeout, number := next(self._numbers), call)
            if answer.cancelled():
                # A process that still runs its event loop cancels the call, and says so.
                if not self.is_async or (await process.query(_PULSE_SECONDS, next(self._numbers), number)).cancelled():
                    self.close(process)
                return None
            if (scores := answer.result()) is not None:
                return scores
            self._deaths += self._process is process  # each async call under way learns of it; the first counts it
            self.close(process)
        return [failure("its process died (the function ended it: os._exit, a crash, too much memory)")]

    def take_counts(self) -> dict[str, int]:
        deaths, self._deaths = self._deaths, 0
        return {"deaths": deaths}

    def close(self, process: _Process | None = None) -> None:
        """Given a process, end it alone: another call may have begun a new one since."""
        ending = self._process
        if ending is not None and process in (None, ending):
            self._process = None
            ending.end()

    def _start(self) -> _Process:
        if not self._was_said:
            logger.info(
                "reward %s runs in a process of its own: what it changes in objects of the script is not seen here, "
                "nor there what the script changes from now on (process=False runs it in this process)",
                self.name,
            )
            self._was_said = True
        forker = _forkers.setdefault(os.getpid(), ThreadPoolExecutor(1, "fork"))
        return forker.submit(_Process, self.get_function(), self.is_async).result()


def _settle(parent: int) -> None:
    """Become a process of our own, which ends with its parent."""
    os.setsid()
    die_with_parent(parent)
    generators.keeps_states = False
    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, signal.SIG_DFL)
    with suppress(OSError):
        sys.stdin = open(os.devnull)  # noqa: SIM115  for as long as the process lives
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    if shards := sys.modules.get("verl.weights.shards"):  # else nothing is trained here
        shards.release_in_fork()


def _serve(function: Callable[..., Any], is_awaited: bool, pipe: Connection) -> None:
    """Make calls until there are no more requests, which raises EOFError. Plain functions are called one after the
    other in this thread, and no event loop runs meanwhile."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    _answer(pipe, 0, [])
    if is_awaited:
        loop.run_until_complete(_serve_async(function, pipe))
    while True:
        number, call = pickle.loads(pipe.recv_bytes())
        _answer(pipe, number, call_plain(function, call, loop))


async def _serve_async(function: Callable[..., Any], pipe: Connection) -> None:
    """The same of an async function, whose calls are under way together."""
    tasks: dict[int, asyncio.Task[None]] = {}
    reader = ThreadPoolExecutor(1)  # its own: the function may keep all threads of the loop's busy

    async def score(number: int, call: Call) -> None:
        _answer(pipe, number, await call_async(function, call, number <= WATCHED))
        tasks.pop(number, None)

    while True:
        number, request = pickle.loads(await asyncio.get_running_loop().run_in_executor(reader, pipe.recv_bytes))
        if isinstance(request, Call):
            tasks[number] = asyncio.create_task(score(number, request))
            continue
        if late := tasks.pop(request, None):  # it is the number of a call to cancel
            late.cancel()
        _answer(pipe, number, [])


def _answer(pipe: Connection, number: int, scores: list[Score]) -> None:
    """Send the number of a request, files of the user's that have been imported since the last one, and its scores."""
    pipe.send_bytes(json.dumps([number, new_user_files(), *map(astuple, scores)]).encode())


def can_travel(function: Callable[..., Any]) -> bool:
    """Whether a function may run in a forked process: on Linux, and if it reaches no model or tensor, whose memory is
    trained here or on a device."""
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
    elif isinstance(value, list | tuple | set | dict):
        inner = list(value.values() if isinstance(value, dict) else value)[:100]
    elif hasattr(value, "__dict__"):
        inner = [*vars(value).values(), getattr(type(value), "__call__", None)]  # noqa: B004
    for one in inner:
        yield from _reached(one, depth - 1)
