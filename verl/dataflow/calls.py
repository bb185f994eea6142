"""Calls of a step with a timeout, timed: plain functions in the compute thread, async ones on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from verl._host.user_calls import LateError, UserCode, is_async, is_users, watched, within
from verl._host.user_code import describe, line_of
from verl.batch import Batch
from verl.dataflow import loop
from verl.dataflow.graph import Node
from verl.errors import ClusterError, DataError, TrainingError, VerlError

T = TypeVar("T")

#: Seconds that one call of a node, or the wait for the next sample, may take when nobody says otherwise.
DEADLINE = 1800.0
#: Seconds; calls that are closer than this are one span of the timeline, such as the steps of an engine.
JOINED = 1e-3
_END = object()


@dataclass
class Timing:
    """When a node worked: spans (start, end) in seconds since the epoch."""

    role: str
    spans: list[tuple[float, float]] = field(default_factory=list)

    @property
    def busy(self) -> float:
        return sum(end - start for start, end in self.spans)


class NodeLock:
    """Held by one node at a time; calls of that node may overlap, since they wait for different things."""

    def __init__(self) -> None:
        self._holder: object = None
        self._calls = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def held_by(self, holder: object) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._calls or self._holder == holder)
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


class TimedCalls:
    """The calls of one part of a step: each has a timeout, is timed, and is named in its errors.

    Args:
        deadline: seconds for a call without a timeout of its own.
        needs: node -> the nodes that it waits for, which a stall names.
    """

    def __init__(self, deadline: float, needs: Mapping[str, Sequence[str]]) -> None:
        self.deadline, self._needs = deadline, needs
        self.timings: dict[str, Timing] = {}
        self._epoch = time.time() - time.perf_counter()
        self.running: set[loop.Job] = set()
        #: Sources that are being closed.
        self.closing: list[loop.Job] = []

    async def in_thread(
        self, name: str, function: Callable[..., T], *args: Any, role: str = "", limit: float | None = None
    ) -> T:
        """Call a plain function in the compute thread; its deadline begins when the thread gets to it."""
        limit = limit or self.deadline
        job = loop.submit(watched(f"node '{name}'", limit)(function), *args)
        self.running.add(job)
        await asyncio.shield(asyncio.wrap_future(job.started))
        result = within(asyncio.shield(asyncio.wrap_future(job.result)), limit)
        value: T = await self._timed(name, role, limit, result, job)
        self.running.discard(job)
        return value

    async def run(self, node: Node, batch: Batch) -> Any:
        """`node.run(batch)`."""
        if not is_async(node.run):
            return await self.in_thread(node.name, node.run, batch, role=node.role, limit=node.deadline)
        limit = node.deadline or self.deadline
        if is_users(node.run):  # which may block its event loop: that must not be ours
            result = within(UserCode(f"node '{node.name}'").call(limit, node.run, batch), None)
        else:
            result = within(node.run(batch), limit)
        return await self._timed(node.name, node.role, limit, result)

    async def stream(self, node: Node, prompts: Batch) -> AsyncGenerator[Any, None]:
        """Batches of a source, each wait bounded. However it ends, the source is closed and frees its engine."""
        options: dict[str, Any] = {"role": node.role, "limit": node.deadline}
        stream = await self.in_thread(node.name, node.run, prompts, **options)
        if not isinstance(stream, AsyncIterator | Iterator):
            raise DataError(f"source '{node.name}' returned {type(stream).__name__}: return an iterator of batches")
        try:
            while True:
                if isinstance(stream, AsyncIterator):
                    limit = node.deadline or self.deadline
                    value = await self._timed(node.name, node.role, limit, within(anext(stream, _END), limit))
                else:
                    value = await self.in_thread(node.name, next, stream, _END, **options)
                if value is _END:
                    return
                yield value
        finally:
            if hasattr(stream, "aclose"):
                await asyncio.wait({asyncio.ensure_future(stream.aclose())}, timeout=self.deadline)
            elif hasattr(stream, "close"):
                self.closing.append(loop.submit(stream.close))

    def stalled(self, name: str, limit: float, what: str = "did not return", where: str | None = None) -> ClusterError:
        """The error of a missed deadline. The stacks of all threads are logged.

        Args:
            where: the line of the user's code that it has reached.
        """
        waiting = [node for node, needs in self._needs.items() if name in needs]
        reason = f"node '{name}' {what} within {limit:g} s" + (f" ({where})" if where else "")
        loop.dump_stacks(reason)
        return ClusterError(
            f"{reason}; waiting for it: {', '.join(waiting) or 'the end of the run'}. "
            "The stacks of all threads are in the log; a longer deadline may be set"
        )

    async def _timed(
        self, name: str, role: str, limit: float, result: Awaitable[Any], job: loop.Job | None = None
    ) -> Any:
        """The result of an awaitable; its time is noted, and its errors name it."""
        spans = self.timings.setdefault(name, Timing(role or name)).spans
        start = self._epoch + time.perf_counter()
        try:
            return await result
        except LateError as error:
            where = error.where
        except VerlError as error:
            raise type(error)(f"node '{name}': {error}") from error
        except Exception as error:
            raise TrainingError(f"node '{name}' failed: {describe(error)}") from error
        finally:
            while spans and start < spans[-1][1] + JOINED:  # overlaps others, or follows closely
                start = min(start, spans.pop()[0])
            spans.append((start, self._epoch + time.perf_counter()))
        # A thread cannot be stopped from outside. The one that is stuck is left behind, and calls that wait for it go
        # to a new one: the process can still report the error, save and end.
        if job is not None:
            where = line_of(job.thread)
            self.running.discard(job)
            loop.abandon(job)
        raise self.stalled(name, limit, where=where)
