"""Calls of a user's function in a process of its own, which is killed when it is late. It is forked, so nothing has to
be pickled to get there, and stays for the whole run."""

from __future__ import annotations

import concurrent.futures
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
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from verl.rewards import generators
from verl.rewards.calls import FunctionCaller, Host, serve
from verl.rewards.scores import Score
from verl.sandbox.jail import die_with_parent
from verl.user_functions import new_user_files, note_files

logger = logging.getLogger(__name__)
#: In the place of a request's number: files of the user's that the process has imported.
_IMPORTED = -1


class _Process(Host):
    """A fork of this process. It is to be made in the thread of `_forker`."""

    def __init__(self, function: Callable[..., Any], is_awaited: bool) -> None:
        super().__init__()
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
                serve(function, is_awaited, _requests(theirs), partial(_answer, theirs))
            os._exit(0)
        theirs.close()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, number: int, *request: Any) -> None:
        # A process that hangs does not read.
        threading.Thread(target=self._write, args=(number, *request), daemon=True).start()

    def end(self) -> None:
        """Kill the process and all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _write(self, number: int, *request: Any) -> None:
        try:
            with self._lock:
                self._pipe.send_bytes(pickle.dumps((number, *request)))
        except OSError:  # it has ended
            self.answer(number, None)

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, *scores = json.loads(self._pipe.recv_bytes())
                if number == _IMPORTED:
                    note_files(scores[0])
                    continue
                self.answer(number, [Score(*score) for score in scores])
        self.end()
        os.waitpid(self.pid, 0)
        for number in list(self._answers):
            self.answer(number, None)


class ProcessCaller(FunctionCaller):
    """Calls in one process, which is killed when a call is late."""

    _was_said = False

    def _start(self) -> Host:
        if not self._was_said:
            logger.info(
                "reward %s runs in a process of its own: what it changes in objects of the script is not seen here, "
                "nor there what the script changes from now on (process=False runs it in this process)",
                self.name,
            )
            self._was_said = True
        return _forker().submit(_Process, self.function, self.is_async).result()


_forkers: dict[int, concurrent.futures.ThreadPoolExecutor] = {}


def _forker() -> concurrent.futures.ThreadPoolExecutor:
    """The thread that forks: one that stays, as the kernel ends a process with the thread that forked it."""
    return _forkers.setdefault(os.getpid(), concurrent.futures.ThreadPoolExecutor(1, "fork"))


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
    if forks := sys.modules.get("verl.weights.forks"):  # else nothing is trained here
        forks.release()


def _requests(pipe: Connection) -> Iterator[tuple[Any, ...]]:
    with suppress(EOFError):
        while True:
            yield pickle.loads(pipe.recv_bytes())


def _answer(pipe: Connection, number: int, scores: list[Score]) -> None:
    if files := new_user_files():
        pipe.send_bytes(json.dumps([_IMPORTED, files]).encode())
    pipe.send_bytes(json.dumps([number, *map(astuple, scores)]).encode())


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
    elif isinstance(value, list | tuple | set | dict):
        inner = list(value.values() if isinstance(value, dict) else value)[:100]
    elif hasattr(value, "__dict__"):
        inner = [*vars(value).values(), getattr(type(value), "__call__", None)]  # noqa: B004
    for one in inner:
        yield from _reached(one, depth - 1)
