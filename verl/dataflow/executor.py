"""The executor of graphs: every way of training runs through `run`.

A row-wise node works on the groups that are finished while the source is still at slow ones. How rows are cut into
calls is fixed by the graph and the order of the sample ids, and what comes back is put together in that order: the
clock decides when a node runs, never what it computes on.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from verl.batch import Batch
from verl.cluster.controller import start
from verl.dataflow import loop
from verl.dataflow.graph import ANY, Graph, Node
from verl.dataflow.pieces import Pieces
from verl.errors import ClusterError, DataError, RolloutError, TrainingError, VerlError, nearest
from verl.rewards.calls import is_async
from verl.user_code import describe

#: Seconds that one call of a node, or the wait for the next sample, may take when nobody says otherwise.
DEADLINE = 1800.0
#: Seconds; the steps of an engine are no spans of their own.
JOINED = 1e-3
_END = object()


@dataclass
class Timing:
    """When a node worked, in seconds since the run began; `busy`: while at least one of its calls was running.

    `spans` are the (start, end) of that; calls less than `JOINED` seconds apart are one span.
    """

    busy: float = 0.0
    calls: int = 0
    rows: int = 0
    spans: list[tuple[float, float]] = field(default_factory=list)

    def worked(self, start: float, end: float) -> None:
        self.busy += end - start
        if self.spans and start - self.spans[-1][1] < JOINED:
            start, _ = self.spans.pop()
        self.spans.append((start, end))


@dataclass(frozen=True)
class Result:
    """What a run gave.

    batch: all rows, in the order of the ids, with all columns; null where a node dropped the row.
    metrics: of all nodes. Over the calls of one node, names ending in "/max" combine by maximum, in "/count" by sum,
        others by the mean over rows.
    timings: by node.
    began: when the run began, in seconds since the epoch.
    """

    batch: Batch
    metrics: dict[str, float]
    timings: dict[str, Timing]
    began: float

    def __getitem__(self, name: str) -> Any:
        """A column of `batch`, or else a metric.

        Raises:
            KeyError: there is neither.
        """
        if name in self.batch:
            return self.batch[name]
        if name in self.metrics:
            return self.metrics[name]
        raise KeyError(f"the run gave no '{name}': {nearest(name, {*self.batch.columns, *self.metrics})}")


def run_graph(
    graph: Graph, batch: Batch, *, deadline: float = DEADLINE, slots: Mapping[str, Slot] | None = None
) -> Result:
    """`run` for synchronous code, notebooks included."""
    start()
    return loop.run_sync(run(graph, batch, deadline=deadline, slots=slots))


async def run(
    graph: Graph, batch: Batch, *, deadline: float = DEADLINE, slots: Mapping[str, Slot] | None = None
) -> Result:
    """Run a graph on a batch (of prompts, where the graph has a source).

    Args:
        deadline: seconds for one call of a node that has none of its own.
        slots: by name, those that several runs share: their nodes are mutually exclusive across runs.

    Raises:
        ClusterError: a deadline passed; names the node waited for, stacks of all threads are in the log.
        VerlError: a node's own, with the node's name; other exceptions of a node become `TrainingError`.
        DataError: the batch lacks columns, or a node returned other columns or rows than it declares.
    """
    return await _Run(graph, batch, deadline, slots or {}).execute()


class Slot:
    """Held by one node at a time; calls of the node that holds it may overlap (they wait for different things)."""

    def __init__(self) -> None:
        self._holder: object = None
        self._calls = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def held_by(self, holder: object) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._calls == 0 or self._holder == holder)
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


class _Clock:
    """The timings of the nodes of one run."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.epoch = time.time()
        self.timings: dict[str, Timing] = {}
        self._active: dict[str, int] = defaultdict(int)
        self._since: dict[str, float] = {}

    @contextmanager
    def call(self, name: str, rows: int) -> Iterator[None]:
        now = time.perf_counter() - self.began
        timing = self.timings.setdefault(name, Timing())
        timing.calls += 1
        timing.rows += rows
        if self._active[name] == 0:
            self._since[name] = now
        self._active[name] += 1
        try:
            yield
        finally:
            self._active[name] -= 1
            if self._active[name] == 0:
                timing.worked(self._since[name], time.perf_counter() - self.began)


class _Run:
    """One run of a graph: a task a node, a task a call of it."""

    def __init__(self, graph: Graph, batch: Batch, deadline: float, slots: Mapping[str, Slot]) -> None:
        self.graph = graph
        self.batch = batch
        self.deadline = deadline
        self.base = graph.source.name if graph.source else ""
        _check_inputs(graph, batch)
        #: for each group its samples to come: id and row of the run's batch
        self.groups = _plan(graph.source, batch)
        self.slots: dict[str, Slot] = defaultdict(Slot, slots)
        self.metrics: dict[str, list[tuple[int, dict[str, float]]]] = defaultdict(list)
        self.jobs: set[loop.Job] = set()
        self.closing: list[loop.Job] = []
        self.clock = _Clock()

    async def execute(self) -> Result:
        producers = dict.fromkeys([self.base, *self.graph.nodes])
        self.pieces = Pieces(producers, [len(group) for group in self.groups])
        self.ended = {name: asyncio.get_running_loop().create_future() for name in producers}
        if self.graph.source is None:
            self.pieces.deliver("", range(len(self.groups)), range(len(self.batch)), self.batch)
        tasks = [asyncio.create_task(self._node(self.graph.nodes[name])) for name in self.graph.order]
        try:
            await _all(tasks)
        finally:
            await self._settle()
        return Result(self.pieces.everything(), self._metrics(), self.clock.timings, self.clock.epoch)

    async def _settle(self) -> None:
        """Wait until sources are closed and, after a failure, running calls have ended."""
        running = [job for job in self.jobs if not job.result.cancel()]
        waits = [asyncio.wrap_future(job.result) for job in [*running, *self.closing]]
        if waits:
            done, _ = await asyncio.wait(waits, timeout=self.deadline)
            for future in done:
                future.exception()

    def _metrics(self) -> dict[str, float]:
        out: dict[str, float] = {}
        for name in self.graph.order:
            for key, value in combined(self.metrics[name]).items():
                if key in out:
                    raise DataError(f"metric '{key}' of node '{name}' has been given by an earlier node already")
                out[key] = value
        return out

    async def _node(self, node: Node) -> None:
        first = self.graph.needs[node.name] if node.kind == "batch" else node.after
        await asyncio.gather(*(asyncio.shield(self.ended[name]) for name in first))
        if node.kind == "source":
            await self._source(node)
        else:
            total = max(len(self.groups), 1)
            step = node.groups if node.kind == "rows" and node.groups else total
            cuts = [range(start, min(start + step, len(self.groups))) for start in range(0, total, step)]
            await _all([asyncio.create_task(self._chunk(node, groups)) for groups in cuts])
        self.ended[node.name].set_result(None)

    async def _chunk(self, node: Node, groups: range) -> None:
        """One call of a node: wait for what it reads, run it, deliver what it wrote."""
        rows, given = await self._given(node, groups)
        if not rows and node.inputs:
            if node.kind == "batch" and not node.skip_empty:
                raise DataError(f"no row is left for node '{node.name}'")
            self.pieces.deliver(node.name, groups, [], Batch.from_columns({}))
            return
        async with self.slots[node.slot].held_by((self, node.name)):
            value = await self._call(node, given, len(rows))
        kept, columns = _written(node, given, self._accept(node, value, len(rows)))
        self.pieces.deliver(node.name, groups, [rows[at] for at in kept], columns)

    async def _given(self, node: Node, groups: range) -> tuple[list[int], Batch]:
        """The rows a call works on, and the columns it reads. `id` goes along, to tell the rows of its result."""
        writers = {column: self.graph.writers.get(column, self.base) for column in node.reads}
        whole = {self.base, *self.graph.before[node.name]} if ANY in node.inputs else set()
        sources = {*writers.values(), *whole} - {self.base}
        names = [self.base, *(name for name in self.graph.order if name in sources)]
        rows, written = await self.pieces.gather(names, groups)
        given: dict[str, Any] = {}
        for name, columns in written.items():
            reads = [column for column, writer in writers.items() if writer == name]
            if rows and (lacking := [c for c in reads if node.reads[c] and c not in columns]):
                raise DataError(f"node '{node.name}' reads {lacking}, which the samples lack: {columns!r}")
            tag = ["id"] if name == self.base else []
            reads = columns.columns if name in whole else [c for c in (*reads, *tag) if c in columns]
            given.update({column: columns.arrow(column) for column in reads})
        return rows, Batch.from_columns(given)

    async def _call(self, node: Node, given: Batch, rows: int) -> Any:
        if not is_async(node.run):
            return await self._compute(node, rows, node.run, given)
        with self.clock.call(node.name, rows):
            return await self._bounded(node, node.run(given))

    async def _compute(self, node: Node, rows: int, function: Any, *args: Any) -> Any:
        """A call in the compute thread; its deadline begins when the thread gets to it."""
        job = loop.submit(function, *args)
        self.jobs.add(job)
        await asyncio.shield(asyncio.wrap_future(job.started))
        with self.clock.call(node.name, rows):
            value = await self._bounded(node, asyncio.shield(asyncio.wrap_future(job.result)), job)
        self.jobs.discard(job)
        return value

    async def _bounded(self, node: Node, work: Awaitable[Any], job: loop.Job | None = None) -> Any:
        limit = node.deadline or self.deadline
        task = asyncio.ensure_future(_ordinary(work))
        try:
            done, _ = await asyncio.wait({task}, timeout=limit)
            if task.cancelled():
                raise TrainingError("it was cancelled from within")
            if done:
                return task.result()
        except VerlError as error:
            raise type(error)(f"node '{node.name}': {error}") from error
        except Exception as error:
            raise TrainingError(f"node '{node.name}' failed: {describe(error)}") from error
        finally:
            task.cancel()
        if job is not None:
            self.jobs.discard(job)
            loop.abandon(job)
        raise self._stall(node, limit)

    def _stall(self, node: Node, limit: float) -> ClusterError:
        waiting = [name for name, needs in self.graph.needs.items() if node.name in needs]
        what = "gave no sample" if node.kind == "source" else "did not return"
        reason = f"node '{node.name}' (slot '{node.slot}') {what} within {limit:g} s"
        loop.dump_stacks(reason)
        return ClusterError(
            f"{reason}; waiting for it: {', '.join(waiting) or 'the end of the run'}. "
            "The stacks of all threads are in the log; a longer deadline may be set"
        )

    def _accept(self, node: Node, value: Any, rows: int | None = None) -> Batch:
        """The columns a node returned; its metrics are put aside."""
        columns, metrics = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
        columns = Batch.from_columns({}) if columns is None else columns
        if not isinstance(columns, Batch) or not isinstance(metrics, dict):
            raise DataError(
                f"node '{node.name}' returned {type(value).__name__}: return a Batch or None, or a pair of that and a "
                "dictionary of metrics"
            )
        if metrics:
            self.metrics[node.name].append((len(columns) if rows is None else rows, metrics))
        return columns

    async def _source(self, node: Node) -> None:
        """Take samples as they finish; a group goes on when its last one is there."""
        expected = {id_: (group, at) for group, ids in enumerate(self.groups) for at, (id_, _) in enumerate(ids)}
        waiting: dict[int, dict[int, Batch]] = {group: {} for group in range(len(self.groups))}
        async with self.slots[node.slot].held_by((self, node.name)):
            progress = time.monotonic()
            async with aclosing(self._stream(node)) as stream:
                async for value in stream:
                    samples = self._accept(node, value)
                    _check_samples(node, samples)
                    self.clock.timings[node.name].rows += len(samples)
                    if len(samples):
                        progress = time.monotonic()
                    elif time.monotonic() - progress > (limit := node.deadline or self.deadline):
                        raise self._stall(node, limit)
                    for row, id_ in enumerate(samples["id"] if len(samples) else []):
                        group, at = expected.pop(id_, (-1, 0))
                        if group < 0:
                            raise RolloutError(f"source '{node.name}' gave sample '{id_}' twice, or unannounced")
                        waiting[group][at] = samples.slice(row, 1)
                        if len(waiting[group]) == len(self.groups[group]):
                            self._deliver_samples(node, group, waiting.pop(group))
        if expected:
            self.metrics[node.name].append((0, {f"{node.name}/missing/count": float(len(expected))}))
        for group, have in waiting.items():
            self._deliver_samples(node, group, have)

    def _deliver_samples(self, node: Node, group: int, have: dict[int, Batch]) -> None:
        """The samples of a group in their order, with the columns of their prompts."""
        order = sorted(have)
        samples = Batch.concat(have[at] for at in order)
        if order:
            samples = samples.add(self.batch.take([self.groups[group][at][1] for at in order]))
        first = sum(len(ids) for ids in self.groups[:group])
        self.pieces.deliver(node.name, range(group, group + 1), [first + at for at in order], samples)

    async def _stream(self, node: Node) -> AsyncGenerator[Any, None]:
        """What a source yields, each wait bounded. However it ends, the source is closed and frees its engine."""
        prompts = self.batch if ANY in node.inputs else self.batch.select(node.reads)
        stream = await self._compute(node, 0, node.run, prompts)
        if not isinstance(stream, AsyncIterator | Iterator):
            raise DataError(f"source '{node.name}' returned {type(stream).__name__}: return an iterator of batches")
        try:
            while True:
                if isinstance(stream, AsyncIterator):
                    with self.clock.call(node.name, 0):
                        value = await self._bounded(node, _next(stream))
                else:
                    value = await self._compute(node, 0, next, stream, _END)
                if value is _END:
                    return
                yield value
        finally:
            if isinstance(stream, AsyncIterator):
                await asyncio.wait({asyncio.ensure_future(_close(stream))}, timeout=self.deadline)
            elif hasattr(stream, "close"):
                self.closing.append(loop.submit(stream.close))


async def _all(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for tasks; the first failure, in their order, cancels the rest and is raised."""
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result


async def _ordinary(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except (KeyboardInterrupt, SystemExit) as error:
        raise loop.ordinary(error) from error


async def _next(stream: AsyncIterator[Any]) -> Any:
    return await anext(stream, _END)


async def _close(stream: AsyncIterator[Any]) -> None:
    if hasattr(stream, "aclose"):
        await stream.aclose()


def _check_inputs(graph: Graph, batch: Batch) -> None:
    for node in graph.nodes.values():
        if graph.source is not None and node is not graph.source:
            continue  # works on samples, which bring columns of their own: checked when they are there
        for column in graph.external(node):
            if column not in batch:
                raise DataError(f"node '{node.name}' reads column '{column}', which the batch lacks: {batch!r}")


def _plan(source: Node | None, batch: Batch) -> list[list[tuple[str, int]]]:
    if source is not None and source.samples is not None:
        planned = source.samples(batch)
        if len(planned) != len(batch):
            raise DataError(f"source '{source.name}' plans samples of {len(planned)} prompts, got {len(batch)}")
        groups = [[(id_, row) for id_ in ids] for row, ids in enumerate(planned)]
    else:
        if source is not None and "id" not in batch:
            raise DataError(f"source '{source.name}' does not say which samples will come, nor has the batch ids")
        ids = batch["id"] if "id" in batch else [str(row) for row in range(len(batch))]
        names = batch["group"] if "group" in batch else [None] * len(batch)
        groups = []
        for row, (id_, name) in enumerate(zip(ids, names, strict=True)):
            if row and name is not None and name == names[row - 1]:
                groups[-1].append((id_, row))
            else:
                groups.append([(id_, row)])
    if source is not None and (twice := _twice([id_ for group in groups for id_, _ in group])) is not None:
        raise DataError(f"two samples of source '{source.name}' would have the id '{twice}'")
    return groups


def _check_samples(node: Node, samples: Batch) -> None:
    lacking = [c for c, is_certain in {**node.writes, "id": True}.items() if is_certain and c not in samples]
    if len(samples) and lacking:
        raise DataError(f"samples of source '{node.name}' lack {lacking}: {samples!r}")


def _written(node: Node, given: Batch, result: Batch) -> tuple[list[int], Batch]:
    """Which of the given rows a result has, ascending, and its new columns in that order.

    A result may repeat the columns it was given; those are as before and are left out.
    """
    new = result.drop(given.columns)
    missing = [column for column, is_certain in node.writes.items() if is_certain and column not in result]
    extra = [column for column in new.columns if not node.may_write(column)]
    if missing or extra:
        faults = ([f"lacks {missing}"] if missing else []) + ([f"has undeclared {extra}"] if extra else [])
        raise DataError(f"what node '{node.name}' returned {' and '.join(faults)}; it declares {list(node.outputs)}")
    kept = _matched(node, given, result) if result.columns else list(range(len(given)))
    if node.kind == "rows" and len(kept) < len(given):
        raise DataError(f"row-wise node '{node.name}' returned {len(kept)} rows for {len(given)}")
    order = sorted(range(len(kept)), key=kept.__getitem__)
    return sorted(kept), new if order == list(range(len(kept))) else new.take(order)


def _matched(node: Node, given: Batch, result: Batch) -> list[int]:
    """For each row of a result, which of the given rows it is: by `id` where both have one, else by position."""
    if "id" in given and "id" in result and result["id"] != given["id"]:
        if (twice := _twice(result["id"])) is not None:
            raise DataError(f"node '{node.name}' returned the row '{twice}' twice")
        row_of = {id_: row for row, id_ in enumerate(given["id"])}
        if unknown := [id_ for id_ in result["id"] if id_ not in row_of]:
            raise DataError(f"node '{node.name}' returned rows that it was not given: {unknown[:3]}")
        return [row_of[id_] for id_ in result["id"]]
    if len(result) != len(given):
        raise DataError(
            f"node '{node.name}' returned {len(result)} rows for {len(given)}; to drop rows, return the ids of the rest"
        )
    return list(range(len(given)))


def _twice(ids: Sequence[str]) -> str | None:
    seen: set[str] = set()
    return next((id_ for id_ in ids if id_ in seen or seen.add(id_)), None)  # type: ignore[func-returns-value]


def combined(calls: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Metrics of several calls, each with its number of rows: names that end in "/max" by maximum, in "/count" by sum,
    others by the mean over rows. Sums are correctly rounded, so that the order of the calls does not show."""
    values: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for rows, metrics in calls:
        for name, value in metrics.items():
            values[name].append((max(rows, 1), value))
    out = {}
    for name, pairs in values.items():
        if name.endswith("/max"):
            out[name] = max(value for _, value in pairs)
        elif name.endswith("/count"):
            out[name] = _sum([value for _, value in pairs])
        elif len(pairs) == 1:
            out[name] = pairs[0][1]
        else:
            out[name] = _sum([rows * value for rows, value in pairs]) / sum(rows for rows, _ in pairs)
    return out


def _sum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # too large for a float, or infinities of both signs
        return sum(values)
