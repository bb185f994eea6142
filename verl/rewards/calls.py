"""Calling a user's function under a deadline that it cannot break: in a thread that is abandoned, or in a process
that is killed.

`signal.alarm` is never used: it works in the main thread only and cannot interrupt compiled code.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from verl.errors import RewardError
from verl.rewards.scores import Score, call_async, call_plain, failure

#: Abandoned threads of one function that may be alive at the same time.
MAX_HUNG = 16
_ASYNC_CALLS = 64
_START_TIMEOUT = 120.0
_MAX_REPLY = 64 * 2**20
_Job = tuple[concurrent.futures.Future[list[Score]], list[Any], dict[str, Any], int]


class Caller(Protocol):
    """Runs one call after the other in each of `slots` places."""

    slots: threading.Semaphore
    width: int

    async def call(self, args: list[Any], kwargs: dict[str, Any], rows: int, timeout: float) -> list[Score] | None:
        """Scores of `rows` samples, or None if there is no answer within `timeout` seconds."""


async def enter(slots: threading.Semaphore) -> None:
    """Wait for a place. Whoever holds one gives it back within its deadline; loops may differ, so this polls."""
    while not slots.acquire(blocking=False):
        await asyncio.sleep(0.002)


class ThreadCaller:
    """Calls in a daemon thread: one plain call at a time, or many async ones on the thread's own event loop.

    A call that does not answer in time and cannot be cancelled keeps its thread, which is abandoned; the next call
    gets a new one.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.name = name
        self._make = partial(_AsyncThread if _is_async(function) else _PlainThread, function, name)
        self.width = _ASYNC_CALLS if _is_async(function) else 1
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

    def _abandon(self, worker: _PlainThread | _AsyncThread) -> None:
        worker.stop()
        self._worker = None
        self._abandoned = [old for old in (*self._abandoned, worker) if old.thread.is_alive()]
        if len(self._abandoned) >= MAX_HUNG:
            raise RewardError(
                f"reward function '{self.name}' hangs: {len(self._abandoned)} calls have not come back and cannot be "
                "stopped. Mend it, or give it as FILE.py:FUNCTION with processes=1, which can be killed"
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


class ProcessCaller:
    """Calls in processes of their own, one call at a time in each, which are killed when late.

    Arguments and scores travel as JSON lines over pipes. A process starts at its first call and again after a kill.
    The function is not sandboxed: it is the user's own code.
    """

    def __init__(self, spec: str, name: str, processes: int) -> None:
        self.spec, self.name, self.width = spec, name, processes
        self.slots = threading.Semaphore(processes)
        self._idle: list[_Process] = []
        weakref.finalize(self, _kill_all, self._idle)

    async def call(self, args: list[Any], kwargs: dict[str, Any], rows: int, timeout: float) -> list[Score] | None:
        try:
            request = json.dumps({"args": args, "kwargs": kwargs, "rows": rows}).encode() + b"\n"
        except TypeError as error:
            raise RewardError(
                f"reward function '{self.name}': its data cannot go to a process as JSON: {error}"
            ) from error
        process = self._idle.pop() if self._idle else _Process(self.spec)
        keep = False
        try:
            if not process.ready:
                ready = await process.exchange(b"", _START_TIMEOUT)
                if ready is None or "ready" not in ready:
                    raise RewardError(
                        f"reward function '{self.name}' does not start in a process: {ready or 'no answer'}"
                    )
                process.ready = True
            answer = await process.exchange(request, timeout)
            keep = answer is not None and "scores" in answer
        finally:
            if keep:
                self._idle.append(process)
            else:
                process.kill()
        if answer is None:
            return None
        if "scores" not in answer:
            return [failure(str(answer.get("died")))] * rows
        return [Score(**score) for score in answer["scores"]]


class _Process:
    def __init__(self, spec: str) -> None:
        self.ready = False
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "verl.rewards.process", spec],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    async def exchange(self, request: bytes, timeout: float) -> dict[str, Any] | None:
        """The reply; {"died": why} if the process ended or talks nonsense; None after the deadline."""
        future: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        threading.Thread(target=self._exchange, args=(request, future), daemon=True).start()
        answer = asyncio.wrap_future(future)
        done, _ = await asyncio.wait({answer}, timeout=timeout)
        if done:
            return answer.result()
        answer.cancel()
        return None

    def _exchange(self, request: bytes, future: concurrent.futures.Future[dict[str, Any]]) -> None:
        pipe_in, pipe_out = self.popen.stdin, self.popen.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        try:
            pipe_in.write(request)
            pipe_in.flush()
            reply = json.loads(pipe_out.readline(_MAX_REPLY))
        except (OSError, ValueError):
            reply = {"died": f"the process of the function ended (exit status {self._status()})"}
        if future.set_running_or_notify_cancel():
            future.set_result(reply)

    def _status(self) -> int | str:
        try:
            return self.popen.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "none yet"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the whole group is gone already
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(timeout=10.0)


def _kill_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().kill()


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
