"""One call of a node: where it runs, how long it may take, and the error that names the node.

A plain function runs in the compute thread of the process, an async one on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple, TypeVar

from verl._host.user_calls import LateError, UserCode, is_async, is_users, watching, within
from verl._host.user_code import describe, line_of
from verl.batch import Batch
from verl.dataflow import loop
from verl.dataflow.graph import Node
from verl.dataflow.result import Clock
from verl.errors import ClusterError, DataError, TrainingError, VerlError

T = TypeVar("T")
_END = object()


class Work(NamedTuple):
    """The name of a call in errors and in the timeline, its role, and the seconds that it may take."""

    name: str
    role: str
    limit: float

    @property
    def label(self) -> str:
        return f"node '{self.name}'"


class Slot:
    """Held by one node at a time; calls of the node that holds it may overlap (they wait for different things)."""

    def __init__(self) -> None:
        self._holder: object = None
        self._calls = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def held_by(self, holder: object) -> AsyncIterator[None]:
        async with self._changed:
            while self._calls and self._holder != holder:
                await self._changed.wait()
            self._holder = holder
            self._calls += 1
        try:
            yield
        finally:
            async with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold it from synchronous code."""
        held = self.held_by(object())
        loop.run_sync(held.__aenter__())
        try:
            yield
        finally:
            loop.run_sync(held.__aexit__(None, None, None))


class Calls:
    """The calls of a part of a step: each with its deadline, its time, and its name in an error.

    Args:
        deadline: seconds for a call that has none of its own.
        needs: by node, the nodes that it waits for; for the text of a stall.
    """

    def __init__(self, deadline: float, needs: Mapping[str, Sequence[str]]) -> None:
        self.deadline, self._needs = deadline, needs
        self.clock = Clock()
        self._jobs: set[loop.Job] = set()
        self._closing: list[loop.Job] = []

    def work(self, node: Node) -> Work:
        return Work(node.name, node.role, node.deadline or self.deadline)

    async def in_thread(
        self, name: str, function: Callable[..., T], *args: Any, role: str = "", limit: float | None = None
    ) -> T:
        """The result of a plain function, called in the compute thread."""
        return await self._compute(Work(name, role, limit or self.deadline), 0, function, *args)  # type: ignore[no-any-return]

    async def call(self, node: Node, batch: Batch, rows: int) -> Any:
        """What `node.run(batch)` returns; `rows` is the length of the batch, which may have no columns."""
        work = self.work(node)
        if not is_async(node.run):
            return await self._compute(work, rows, node.run, batch)
        with self.clock.call(node.name, rows, node.role):
            if not is_users(node.run):
                return await self._bounded(work, within(node.run(batch), work.limit))
            # An async function of the user's may block its event loop, which is not to be ours.
            code = UserCode(work.label)
            return await self._bounded(work, within(code.call(work.limit, node.run, batch), None))

    async def stream(self, node: Node, prompts: Batch) -> AsyncGenerator[Any, None]:
        """Batches of a source, each wait bounded. However it ends, the source is closed and frees its engine."""
        work = self.work(node)
        stream = await self._compute(work, 0, node.run, prompts)
        if not isinstance(stream, AsyncIterator | Iterator):
            raise DataError(f"source '{node.name}' returned {type(stream).__name__}: return an iterator of batches")
        try:
            while True:
                if isinstance(stream, AsyncIterator):
                    with self.clock.call(node.name, 0, node.role):
                        value = await self._bounded(work, within(_next(stream), work.limit))
                else:
                    value = await self._compute(work, 0, next, stream, _END)
                if value is _END:
                    return
                yield value
        finally:
            if isinstance(stream, AsyncIterator):
                await asyncio.wait({asyncio.ensure_future(_close(stream))}, timeout=self.deadline)
            elif hasattr(stream, "close"):
                self._closing.append(loop.submit(stream.close))

    async def settle(self) -> None:
        """Wait until sources are closed and, after a failure, running calls have ended."""
        running = [job for job in self._jobs if not job.result.cancel()]
        waits = [asyncio.wrap_future(job.result) for job in [*running, *self._closing]]
        self._jobs.clear()
        self._closing.clear()
        if waits:
            done, _ = await asyncio.wait(waits, timeout=self.deadline)
            for future in done:
                future.exception()

    def stalled(self, work: Work, where: str | None = None, what: str = "did not return") -> ClusterError:
        """The error of a missed deadline. The stacks of all threads are logged.

        Args:
            where: the line of the user's at which it is.
        """
        waiting = [name for name, needs in self._needs.items() if work.name in needs]
        reason = f"{work.label} {what} within {work.limit:g} s" + (f" ({where})" if where else "")
        loop.dump_stacks(reason)
        return ClusterError(
            f"{reason}; waiting for it: {', '.join(waiting) or 'the end of the run'}. "
            "The stacks of all threads are in the log; a longer deadline may be set"
        )

    async def _compute(self, work: Work, rows: int, function: Any, *args: Any) -> Any:
        """A call in the compute thread; its deadline begins when the thread gets to it."""
        job = loop.submit(watching(function, work.label, work.limit), *args)
        self._jobs.add(job)
        await asyncio.shield(asyncio.wrap_future(job.started))
        with self.clock.call(work.name, rows, work.role):
            result = asyncio.shield(asyncio.wrap_future(job.result))
            value = await self._bounded(work, within(result, work.limit), job)
        self._jobs.discard(job)
        return value

    async def _bounded(self, work: Work, result: Awaitable[Any], job: loop.Job | None = None) -> Any:
        where = None
        try:
            return await result
        except LateError as error:
            where = str(error).removeprefix("it was at ")
        except VerlError as error:
            raise type(error)(f"{work.label}: {error}") from error
        except Exception as error:
            raise TrainingError(f"{work.label} failed: {describe(error)}") from error
        # A thread cannot be stopped from outside. The one that is stuck is left behind, and calls that wait for it go
        # to a new one: the process can still report the error, save and end.
        if job is not None:
            where = line_of(job.thread)
            self._jobs.discard(job)
            loop.abandon(job)
        raise self.stalled(work, where)


async def _next(stream: AsyncIterator[Any]) -> Any:
    return await anext(stream, _END)


async def _close(stream: AsyncIterator[Any]) -> None:
    if hasattr(stream, "aclose"):
        await stream.aclose()
