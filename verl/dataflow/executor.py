"""The executor of graphs: the nodes of a step on its groups of samples. A group is the samples of one prompt.

A node that works on rows gets a group as soon as the columns that it reads are there, while others are still being
sampled. How rows are cut into calls is fixed by the graph and the order of the sample ids, and results are put together
in that order: the clock decides when a node runs, never what it computes on.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

from verl.batch import Batch
from verl.dataflow.calls import NodeLock, TimedCalls, Timing
from verl.dataflow.graph import ANY, Graph, Node
from verl.errors import DataError, RolloutError, nearest

T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """The result of a graph.

    batch: all rows, in the order of the ids, with all columns; null where a node dropped the row.
    metrics: of all nodes; see `combined`.
    timings: by node.
    """

    batch: Batch
    metrics: dict[str, float]
    timings: dict[str, Timing]

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


class GraphRun:
    """One run of a graph. Made and used on an event loop, by `verl.trainer.step.draw`.

    Args:
        batch: prompts, where the graph has a source; else samples.
        locks: by slot, those that several runs share; other slots are locked within this run.

    Raises:
        DataError: the batch lacks columns that nodes read.
    """

    def __init__(self, graph: Graph, batch: Batch, calls: TimedCalls, locks: Mapping[str, NodeLock]) -> None:
        # Nodes after a source work on samples, which bring columns of their own: checked when they are there.
        for node in [graph.source] if graph.source is not None else graph.nodes.values():
            for column, is_needed in node.reads.items():
                if is_needed and column not in batch and (column not in graph.writers or node is graph.source):
                    raise DataError(f"node '{node.name}' reads column '{column}', which the batch lacks: {batch!r}")
        self.graph, self.batch, self._calls = graph, batch, calls
        self._locks: dict[str, NodeLock] = defaultdict(NodeLock, locks)
        #: The samples that each group will have: the id, and the row of the batch it comes from.
        self._planned = _plan(graph.source, batch)
        self._metrics: dict[str, list[tuple[int, dict[str, float]]]] = defaultdict(list)
        self._base = graph.source.name if graph.source else ""
        self._ran = [node.name for node in graph.of_kind("source", "rows", "batch", "forward")]
        # What a node has written of a group: the rows that it kept, by their numbers in the group, and their columns.
        # Each is a future, so that a reader waits for just the groups that it works on.
        future = asyncio.get_running_loop().create_future
        self._written: dict[str, list[asyncio.Future[tuple[Sequence[int], Batch]]]] = {
            name: [future() for _ in self._planned] for name in (self._base, *self._ran)
        }
        if graph.source is None:
            for number, samples in enumerate(self._planned):
                self.take(number, batch.slice(samples[0][1], len(samples)))

    def take(self, number: int, samples: Batch) -> None:
        """Hand a group to the nodes that wait for it."""
        self._written[self._base][number].set_result((range(len(samples)), samples))

    async def run(self, node: Node) -> None:
        """Make all calls of a node, each as soon as its inputs are there."""
        # A node that works on rows waits for the columns it reads, group by group (`_read`). As a whole it waits only
        # for nodes that it is to follow without reading what they write (`after`).
        waits = self.graph.needs[node.name] if node.kind == "batch" else node.after
        await asyncio.gather(*(asyncio.shield(group) for name in waits for group in self._written[name]))
        total = len(self._planned)
        step = node.groups if node.kind == "rows" and node.groups else max(total, 1)
        starts = range(0, max(total, 1), step)
        await all_of(self._call(node, range(start, min(start + step, total))) for start in starts)

    def result(self) -> Result:
        """All that was written, once all nodes are done.

        Raises:
            DataError: two nodes wrote the same column or metric.
        """
        metrics: dict[str, float] = {}
        for name in self._ran:
            for key, value in combined(self._metrics[name]).items():
                if key in metrics:
                    raise DataError(f"metric '{key}' of node '{name}' has been given by an earlier node already")
                metrics[key] = value
        whole = Batch.concat(map(self._whole_group, range(len(self._planned))))
        return Result(whole, metrics, self._calls.timings)

    def _whole_group(self, group: int) -> Batch:
        """A group with all columns; null where a node dropped the row."""
        _, whole = self._written[self._base][group].result()
        count, writers = len(whole), dict.fromkeys(whole.columns, self._base)
        for name in (name for name in self._ran if name != self._base):
            kept, columns = self._written[name][group].result()
            for column in columns.columns:
                if column in writers:
                    raise DataError(f"column '{column}' was written by '{name}' and by '{writers[column]}'")
                writers[column] = name
            whole = whole.add(columns if len(kept) == count else columns.among(kept, count))
        return whole

    async def _call(self, node: Node, groups: range) -> None:
        """One call of a node: wait for its inputs, run it, hand out what it wrote."""
        # In this order: a node that held its lock while it waits for columns would keep out the very node of the same
        # slot that writes them.
        read = [await self._read(node, group) for group in groups]
        columns, rows = Batch.concat(part for _, part in read), sum(len(kept) for kept, _ in read)
        kept, new = list[int](), Batch.from_columns({})
        if rows or not node.inputs:
            if lacking := [c for c, is_needed in node.reads.items() if rows and is_needed and c not in columns]:
                raise DataError(f"node '{node.name}' reads {lacking}, which the samples lack: {columns!r}")
            async with self._locks[node.slot].held_by((self, node.name)):
                value = await self._calls.run(node, columns, rows)
            kept, new = _written(node, columns, self._accept(node, value, rows))
        elif node.kind == "batch":
            raise DataError(f"no row is left for node '{node.name}'")
        end = 0
        for group, (present, _) in zip(groups, read, strict=True):
            start, end = end, end + len(present)
            low, high = bisect_left(kept, start), bisect_left(kept, end)
            part = new.slice(low, high - low) if new.columns else new
            self._written[node.name][group].set_result(([present[index - start] for index in kept[low:high]], part))

    async def _read(self, node: Node, group: int) -> tuple[Sequence[int], Batch]:
        """The rows of a group that all writers of a node's columns have kept, and these columns; also `id`, by which
        rows of its result are matched."""
        writers = {column: self.graph.writers.get(column, self._base) for column in node.reads}
        # "*" is every column of the samples and of all nodes before.
        whole = {self._base, *self.graph.before[node.name]} if ANY in node.inputs else set()
        sources = {*writers.values(), *whole} - {self._base}
        names = [self._base, *(name for name in self.graph.order if name in sources)]
        written = {name: await asyncio.shield(self._written[name][group]) for name in names}
        common = set.intersection(*(set(kept) for kept, _ in written.values()))
        columns = Batch.from_columns({})
        for name, (kept, batch) in written.items():
            reads = [c for c in node.reads if writers[c] == name] + (["id"] if name == self._base else [])
            part = batch if name in whole else batch.select(dict.fromkeys(reads))
            if part.columns and len(kept) > len(common):
                part = part.take([index for index, row in enumerate(kept) if row in common])
            columns = columns.add(part)
        return sorted(common), columns

    def _accept(self, node: Node, value: Any, rows: int | None = None) -> Batch:
        """The columns a node returned; keeps its metrics for the result."""
        columns, metrics = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
        columns = Batch.from_columns({}) if columns is None else columns
        if not isinstance(columns, Batch) or not isinstance(metrics, dict):
            raise DataError(
                f"node '{node.name}' returned {type(value).__name__}: return a Batch or None, or a pair of that and a "
                "dictionary of metrics"
            )
        if metrics:
            self._metrics[node.name].append((len(columns) if rows is None else rows, metrics))
        return columns

    async def sampled(self) -> AsyncGenerator[tuple[int, Batch], None]:
        """Groups from the source, each when its last sample is there: its number, and its samples in their order with
        the columns of their prompts. Recorded samples are there from the beginning, and none comes."""
        if (node := self.graph.source) is None:
            return
        expected = {id_: (group, n) for group, ids in enumerate(self._planned) for n, (id_, _) in enumerate(ids)}
        waiting: dict[int, dict[int, Batch]] = {group: {} for group in range(len(self._planned))}
        prompts = self.batch if ANY in node.inputs else self.batch.select(node.reads)
        certain = [column for column, is_certain in {**node.writes, "id": True}.items() if is_certain]
        async with self._locks[node.slot].held_by((self, node.name)):
            progress, limit = time.monotonic(), node.deadline or self._calls.deadline
            async with aclosing(self._calls.stream(node, prompts)) as stream:
                async for value in stream:
                    samples = self._accept(node, value)
                    if len(samples):
                        progress = time.monotonic()
                        if lacking := [column for column in certain if column not in samples]:
                            raise DataError(f"samples of source '{node.name}' lack {lacking}: {samples!r}")
                    elif time.monotonic() - progress > limit:
                        raise self._calls.stalled(node.name, limit, "gave no sample")
                    self._calls.timings[node.name].rows += len(samples)
                    for id_, rows in _by_sample(samples):
                        group, n = expected.pop(id_, (-1, 0))
                        if group < 0:
                            raise RolloutError(f"source '{node.name}' gave sample '{id_}' twice, or unannounced")
                        waiting[group][n] = samples.take(rows)
                        if len(waiting[group]) == len(self._planned[group]):
                            yield group, self._in_order(group, waiting.pop(group))
        if expected:
            self._metrics[node.name].append((0, {f"{node.name}/missing/count": float(len(expected))}))
        for group, samples_of_it in waiting.items():
            yield group, self._in_order(group, samples_of_it)

    def _in_order(self, group: int, samples: Mapping[int, Batch]) -> Batch:
        order = sorted(samples)
        whole = Batch.concat(samples[n] for n in order)
        prompts = [self._planned[group][n][1] for n in order for _ in range(len(samples[n]))]
        return whole.add(self.batch.take(prompts)) if order else whole


async def all_of(work: Iterable[Awaitable[T]]) -> list[T]:
    """The results of all; the first failure, in their order, cancels the rest and is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
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
    return results  # type: ignore[return-value]


def _plan(source: Node | None, batch: Batch) -> list[list[tuple[str, int]]]:
    """The samples of each group: the id of each, and the row of the batch that it comes from.

    A source may say which samples it will make of each prompt; else each row is one sample, and neighbours of one
    `group` are a group.
    """
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
        keys = [("row", row) if name is None else name for row, name in enumerate(names)]
        groups = [[(ids[row], row) for row in rows] for _, rows in groupby(range(len(batch)), keys.__getitem__)]
    if source is not None and (twice := _twice([id_ for group in groups for id_, _ in group])) is not None:
        raise DataError(f"two samples of source '{source.name}' would have the id '{twice}'")
    return groups


def _by_sample(samples: Batch) -> list[tuple[str, list[int]]]:
    """The rows of each sample by its id: one, or several of an episode, which come together."""
    names = samples["episode" if "episode" in samples else "id"] if len(samples) else []
    if "episode" not in samples:
        return [(id_, [row]) for row, id_ in enumerate(names)]
    return [(id_, [*rows]) for id_, rows in groupby(range(len(samples)), names.__getitem__)]


def _written(node: Node, read: Batch, result: Batch) -> tuple[list[int], Batch]:
    """Which of the given rows a result has, ascending, and its new columns in that order.

    A result may repeat the columns it was given, as they are; those are left out.
    """
    new = result.drop(read.columns)
    missing = [column for column, is_certain in node.writes.items() if is_certain and column not in result]
    extra = [column for column in new.columns if not node.may_write(column)]
    if missing or extra:
        faults = ([f"lacks {missing}"] if missing else []) + ([f"has undeclared {extra}"] if extra else [])
        raise DataError(f"what node '{node.name}' returned {' and '.join(faults)}; it declares {list(node.outputs)}")
    kept = _matched(node, read, result) if result.columns else list(range(len(read)))
    if changed := result.changed(read):
        raise DataError(
            f"node '{node.name}' returned other values of column '{changed[0]}', which it was given: columns are "
            "added, never overwritten. Return them under a name that the graph lacks, and name that in its outputs"
        )
    if node.kind == "rows" and len(kept) < len(read):
        raise DataError(f"row-wise node '{node.name}' returned {len(kept)} rows for {len(read)}")
    order = sorted(range(len(kept)), key=kept.__getitem__)
    return sorted(kept), new if order == list(range(len(kept))) else new.take(order)


def _matched(node: Node, read: Batch, result: Batch) -> list[int]:
    """For each row of a result, which of the given rows it is: by `id` where both have one, else by position."""
    if "id" in read and "id" in result and result["id"] != read["id"]:
        if (twice := _twice(result["id"])) is not None:
            raise DataError(f"node '{node.name}' returned the row '{twice}' twice")
        row_of = {id_: row for row, id_ in enumerate(read["id"])}
        if unknown := [id_ for id_ in result["id"] if id_ not in row_of]:
            raise DataError(f"node '{node.name}' returned rows that it was not given: {unknown[:3]}")
        return [row_of[id_] for id_ in result["id"]]
    if len(result) != len(read):
        raise DataError(
            f"node '{node.name}' returned {len(result)} rows for {len(read)}; to drop rows, return the ids of the rest"
        )
    return list(range(len(read)))


def _twice(ids: Sequence[str]) -> str | None:
    seen: set[str] = set()
    return next((id_ for id_ in ids if id_ in seen or seen.add(id_)), None)  # type: ignore[func-returns-value]
