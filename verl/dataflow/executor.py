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
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

from verl.batch import Batch
from verl.dataflow.calls import NodeLock, TimedCalls, Timing
from verl.dataflow.graph import ANY, SLOT, Graph, Node
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
        is_sum = name.endswith("/count")
        if name.endswith("/max"):
            out[name] = max(value for _, value in pairs)
        elif len(pairs) == 1 and not is_sum:
            out[name] = pairs[0][1]
        else:
            terms = [value if is_sum else rows * value for rows, value in pairs]
            try:
                total = math.fsum(terms)
            except (OverflowError, ValueError):  # too large for a float, or infinities of both signs
                total = sum(terms)
            out[name] = total if is_sum else total / sum(rows for rows, _ in pairs)
    return out


class GraphRun:
    """One run of a graph. Made and used on an event loop, by `verl.trainer.step.draw`.

    Args:
        batch: prompts, where the graph has a source; else samples.
        models: the lock of the models' slot, which several runs share; other slots are locked within this run.

    Raises:
        DataError: the batch lacks columns that nodes read.
    """

    def __init__(self, graph: Graph, batch: Batch, calls: TimedCalls, models: NodeLock) -> None:
        # Nodes after a source work on samples, which bring columns of their own: checked when they are there.
        for node in [graph.source] if graph.source is not None else graph.nodes.values():
            for column, is_needed in node.reads.items():
                if is_needed and column not in batch and (column not in graph.writers or node is graph.source):
                    raise DataError(f"node '{node.name}' reads column '{column}', which the batch lacks: {batch!r}")
        self.graph, self.batch, self._calls = graph, batch, calls
        self._locks: dict[str, NodeLock] = defaultdict(NodeLock, {SLOT: models})
        #: The samples that each group will have: the id, and the row of the batch it comes from.
        self._planned = _plan(graph.source, batch)
        self._metrics: dict[str, list[tuple[int, dict[str, float]]]] = defaultdict(list)
        self._base = graph.source.name if graph.source else ""
        self._ran = [node.name for node in graph.of_kind("rows", "batch", "forward")]
        # What a node has written of a group: the rows that it kept, by their numbers in the group, and its columns of
        # all rows, null in the others. Each is a future, so that a reader waits for just the groups that it works on.
        future = asyncio.get_running_loop().create_future
        self._written: dict[str, list[asyncio.Future[tuple[set[int], Batch]]]] = {
            name: [future() for _ in self._planned] for name in (self._base, *self._ran)
        }
        if graph.source is None:
            for number, samples in enumerate(self._planned):
                group = {*range(len(samples))}, batch.slice(samples[0][1], len(samples))
                self._written[self._base][number].set_result(group)

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
        """All that was written, once all nodes are done; null where a node dropped the row.

        Raises:
            DataError: two nodes wrote the same column or metric.
        """
        metrics: dict[str, float] = {}
        for name in (self._base, *self._ran):
            for key, value in combined(self._metrics[name]).items():
                if key in metrics:
                    raise DataError(f"metric '{key}' of node '{name}' has been given by an earlier node already")
                metrics[key] = value
        groups = []
        for number in range(len(self._planned)):
            writers: dict[str, str] = {}
            whole = Batch.from_columns({})
            for name, written in self._written.items():
                _, columns = written[number].result()
                for column in columns.columns:
                    if column in writers:
                        raise DataError(f"column '{column}' was written by '{name}' and by '{writers[column]}'")
                    writers[column] = name
                whole = whole.add(columns)
            groups.append(whole)
        return Result(Batch.concat(groups), metrics, self._calls.timings)

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
                value = await self._calls.run(node, columns)
            kept, new = _written(node, columns, self._accept(node, value, rows))
        elif node.kind == "batch":
            raise DataError(f"no row is left for node '{node.name}'")
        end = 0
        for group, (present, _) in zip(groups, read, strict=True):
            start, end = end, end + len(present)
            low, high = bisect_left(kept, start), bisect_left(kept, end)
            numbers = [present[index - start] for index in kept[low:high]]
            total = len(self._written[self._base][group].result()[0])
            part = new.slice(low, high - low) if new.columns else new
            part = part.among(numbers, total) if len(numbers) < total and new.columns else part
            self._written[node.name][group].set_result(({*numbers}, part))

    async def _read(self, node: Node, group: int) -> tuple[list[int], Batch]:
        """The rows of a group that all writers of a node's columns have kept, and these columns; also `id`, by which
        rows of its result are matched."""
        writers = {column: self.graph.writers.get(column, self._base) for column in node.reads}
        # "*" is every column of the samples and of all nodes before.
        whole = {self._base, *self.graph.before[node.name]} if ANY in node.inputs else set()
        columns = Batch.from_columns({})
        common: set[int] | None = None
        for name in dict.fromkeys([self._base, *self.graph.order]):
            if name == self._base or name in whole or name in writers.values():
                kept, written = await asyncio.shield(self._written[name][group])
                common = kept if common is None else common & kept
                reads = [c for c in node.reads if writers[c] == name] + (["id"] if name == self._base else [])
                columns = columns.add(written if name in whole else written.select(dict.fromkeys(reads)))
        rows = sorted(common or ())
        return rows, columns.take(rows) if columns.columns and len(rows) < len(columns) else columns

    def _accept(self, node: Node, value: Any, rows: int | None = None) -> Batch:
        """The columns a node returned; keeps its metrics for the result."""
        columns, metrics = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
        if columns is None or isinstance(columns, Mapping):
            columns = Batch.from_columns(columns or {})
        if not isinstance(columns, Batch) or not isinstance(metrics, dict):
            raise DataError(
                f"node '{node.name}' returned {type(value).__name__}: return a Batch or None, or a pair of that and a "
                "dictionary of metrics"
            )
        if metrics:
            self._metrics[node.name].append((len(columns) if rows is None else rows, metrics))
        return columns

    async def sample(self, node: Node) -> None:
        """Run the source. A group is handed on when its last sample is there, in their order with the columns of their
        prompts; at the end those groups follow that have lost some."""
        expected = {id_: (group, n) for group, ids in enumerate(self._planned) for n, (id_, _) in enumerate(ids)}
        waiting: dict[int, dict[int, Batch]] = {group: {} for group in range(len(self._planned))}
        prompts = self.batch if ANY in node.inputs else self.batch.select(node.reads)
        certain = [column for column, is_certain in {**node.writes, "id": True}.items() if is_certain]

        def complete(group: int) -> None:
            parts = sorted(waiting.pop(group).items())
            rows = [self._planned[group][n][1] for n, part in parts for _ in range(len(part))]
            whole = Batch.concat(part for _, part in parts)
            written = {*range(len(whole))}, whole.add(self.batch.take(rows)) if parts else whole
            self._written[node.name][group].set_result(written)

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
                    # A sample is a row, or several of an episode, which come together.
                    names = samples["episode" if "episode" in samples else "id"] if len(samples) else []
                    keys = names if "episode" in samples else [*enumerate(names)]
                    for _, numbers in groupby(range(len(names)), keys.__getitem__):
                        rows = [*numbers]
                        group, n = expected.pop(names[rows[0]], (-1, 0))
                        if group < 0:
                            raise RolloutError(
                                f"source '{node.name}' gave sample '{names[rows[0]]}' twice, or unannounced"
                            )
                        waiting[group][n] = samples.take(rows)
                        if len(waiting[group]) == len(self._planned[group]):
                            complete(group)
        if expected:
            self._metrics[node.name].append((0, {f"{node.name}/missing/count": float(len(expected))}))
        for group in [*waiting]:
            complete(group)


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
    times = Counter(id_ for group in groups for id_, _ in group)
    if source is not None and (twice := next((id_ for id_, count in times.items() if count > 1), None)) is not None:
        raise DataError(f"two samples of source '{source.name}' would have the id '{twice}'")
    return groups


def _written(node: Node, read: Batch, result: Batch) -> tuple[list[int], Batch]:
    """Which of the given rows a result has, ascending, and its new columns in that order. Rows are matched by
    `id`, where both have one, else by position.

    A result may repeat the columns it was given, as they are; those are left out.
    """
    new = result.drop(read.columns)
    wide = tuple(column.removesuffix(ANY) for column in node.outputs if column.endswith(ANY))
    missing = [column for column, is_certain in node.writes.items() if is_certain and column not in result]
    extra = [column for column in new.columns if column not in node.writes and not column.startswith(wide)]
    if missing or extra:
        faults = ([f"lacks {missing}"] if missing else []) + ([f"has undeclared {extra}"] if extra else [])
        raise DataError(f"what node '{node.name}' returned {' and '.join(faults)}; it declares {list(node.outputs)}")
    kept = list(range(len(read)))
    if "id" in read and "id" in result and result["id"] != read["id"]:
        if (twice := next((id_ for id_, count in Counter(result["id"]).items() if count > 1), None)) is not None:
            raise DataError(f"node '{node.name}' returned the row '{twice}' twice")
        row_of = {id_: row for row, id_ in enumerate(read["id"])}
        if unknown := [id_ for id_ in result["id"] if id_ not in row_of]:
            raise DataError(f"node '{node.name}' returned rows that it was not given: {unknown[:3]}")
        kept = [row_of[id_] for id_ in result["id"]]
    elif result.columns and len(result) != len(read):
        raise DataError(
            f"node '{node.name}' returned {len(result)} rows for {len(read)}; to drop rows, return the ids of the rest"
        )
    if changed := result.changed(read):
        raise DataError(
            f"node '{node.name}' returned other values of column '{changed[0]}', which it was given: columns are "
            "added, never overwritten. Return them under a name that the graph lacks, and name that in its outputs"
        )
    if node.kind == "rows" and len(kept) < len(read):
        raise DataError(f"row-wise node '{node.name}' returned {len(kept)} rows for {len(read)}")
    order = sorted(range(len(kept)), key=kept.__getitem__)
    return sorted(kept), new if order == list(range(len(kept))) else new.take(order)
