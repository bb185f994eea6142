"""One event loop in a background thread and one compute thread a process.

Waiting (rewards, servers) happens on the loop; whatever computes runs in the compute thread, one call at a
time, since two OpenMP pools on the same cores are slower than one. Both threads are daemons: a call that
never returns cannot keep the process from ending.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import faulthandler
import logging
import os
import queue
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from verl._host.user_calls import hear_signals, ordinary
from verl.cluster.controller import start
from verl.errors import ClusterError, ConfigError

T = TypeVar("T")
logger = logging.getLogger(__name__)

#: Seconds without a sign of life from the event loop after which `run_sync` gives up on it.
LOOP_DEADLINE = 60.0
#: Seconds that the two threads get to finish when the interpreter ends.
EXIT_DEADLINE = 2.0


def dump_stacks(reason: str) -> None:
    """Log the stacks of all threads of this process; its workers write theirs to their stderr."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        logger.error("%s; stacks of all threads:\n%s", reason, file.read())
    if module := sys.modules.get("verl.cluster.ray.pool"):  # else there are none
        for pool in list(module.POOLS):
            pool.dump_stacks()


@dataclass(eq=False)
class Job:
    """A call for the compute thread; `started` ends when the call begins, `result` when it is over. `thread`: where."""

    call: Callable[[], Any]
    started: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)
    result: concurrent.futures.Future[Any] = field(default_factory=concurrent.futures.Future)
    thread: int = 0

    def run(self) -> None:
        self.thread = threading.get_ident()
        self.started.set_result(None)
        try:
            self.result.set_result(self.call())
        except BaseException as error:  # the caller gets it, whatever it is
            self.result.set_exception(ordinary(error))


class _Threads:
    """The two threads of this process, made at the first use."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.compute: threading.Thread | None = None
        self.running: Job | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.loop_thread: threading.Thread | None = None

    def work(self) -> None:
        """The loop of the compute thread."""
        while threading.current_thread() is self.compute:
            job = self.jobs.get()
            if job is None:
                return
            if not job.result.set_running_or_notify_cancel():
                continue
            self.running = job
            job.run()
            if self.running is job:
                self.running = None
            # Until the next job comes this frame would keep the last one's arguments and result alive: whole batches,
            # or tensors that `sleep` and `release` are to free.
            del job

    def end(self) -> None:
        """Wait a short while for both threads to end.

        A daemon thread that drops the last reference to a tensor while the interpreter goes down aborts the process.
        """
        end = time.monotonic() + EXIT_DEADLINE
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)
        self.jobs.put(None)
        for thread in (self.compute, self.loop_thread):
            if thread is not None:
                thread.join(max(0.0, end - time.monotonic()))


_threads = _Threads()
if hasattr(os, "register_at_fork"):  # a forked child has none of the parent's threads
    os.register_at_fork(after_in_child=lambda: globals().update(_threads=_Threads()))
atexit.register(lambda: _threads.end())


def submit(function: Callable[..., Any], *args: Any) -> Job:
    """Queue a call for the compute thread. From the compute thread itself the call is made at once."""
    job = Job(partial(function, *args))
    if threading.current_thread() is _threads.compute:
        job.run()
        return job
    _threads.jobs.put(job)
    with _threads.lock:
        if _threads.compute is None:
            _threads.compute = threading.Thread(target=_threads.work, name="verl-compute", daemon=True)
            _threads.compute.start()
    return job


def abandon(job: Job) -> None:
    """Give up on a started call that does not return: the compute thread is replaced, and waiting calls go to the new
    one."""
    with _threads.lock:
        if _threads.running is not job:
            return
        _threads.running = _threads.compute = None
    submit(int)  # which starts the new one


def begin(coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Begin a coroutine on the shared loop, without waiting for it."""
    start()
    with _threads.lock:
        if _threads.loop is None:
            _threads.loop = asyncio.new_event_loop()
            _threads.loop_thread = threading.Thread(target=_threads.loop.run_forever, name="verl-loop", daemon=True)
            _threads.loop_thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, _threads.loop)


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the shared loop from synchronous code, notebooks included, and return its result.

    Called from the compute thread (a node that runs a graph of its own), it uses a loop of that thread instead. It
    waits as long as the loop shows signs of life (what it waits for has its own deadlines).

    Raises:
        ClusterError: an async function blocks the loop; all stacks are logged.
        ConfigError: called from the loop itself, where the coroutine must be awaited.
    """
    if threading.current_thread() is _threads.compute:
        return asyncio.run(coroutine)
    if threading.current_thread() is _threads.loop_thread:
        coroutine.close()
        raise ConfigError("a synchronous call was made from an async node: make that function a plain one")
    hear_signals()
    future, loop = begin(coroutine), _threads.loop
    assert loop is not None
    beat = deque([time.monotonic()], maxlen=1)  # of the loop: the latest call that it has made for us
    try:
        while not concurrent.futures.wait([future], timeout=min(1.0, LOOP_DEADLINE / 4)).done:
            if time.monotonic() - beat[0] > LOOP_DEADLINE:
                reason = f"the event loop has not moved for {LOOP_DEADLINE:g} s: an async function blocks it"
                dump_stacks(reason)
                _threads.loop = None
                raise ClusterError(f"{reason} (let it await, or make it a plain function); all stacks are in the log")
            loop.call_soon_threadsafe(beat.append, time.monotonic())
        return future.result()
    except BaseException:
        future.cancel()
        raise
