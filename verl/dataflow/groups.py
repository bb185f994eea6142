"""The groups of a step, and the nodes that work on them: the one executor of graphs.

A node that works on rows takes a group as soon as the group has the columns that the node reads, while others are still
being sampled. How rows are cut into calls is fixed by the graph and the order of the sample ids, and what comes back is
put together in that order: the clock decides when a node runs, never what it computes on.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from contextlib import aclosing
from itertools import groupby
from typing import Any, TypeVar

from verl.batch import Batch
from verl.dataflow.calls import Calls, Slot
from verl.dataflow.columns import GroupColumns, Row
from verl.dataflow.graph import ANY, Graph, Node
from verl.dataflow.result import Result, combined
from verl.errors import DataError, RolloutError

T = TypeVar("T")

#: Seconds that one call of a node, or the wait for the next sample, may take when nobody says otherwise.
DEADLINE = 1800.0


class Groups:
    """The groups of one batch, and the columns that the nodes of a graph add. A group is the samples of one prompt.

    Made and used on an event loop, by `verl.trainer.step.draw`.

    Args:
        batch: prompts, where the graph has a source; else samples.
        calls: makes the calls of nodes.
        slots: by name, those that several of these share: their nodes are mutually exclusive.

    Raises:
        DataError: the batch lacks columns that nodes read.
    """

    def __init__(self, graph: Graph, batch: Batch, calls: Calls, slots: Mapping[str, Slot]) -> None:
        self.graph, self.batch, self._calls = graph, batch, calls
        self._base = graph.source.name if graph.source else ""
        _check_inputs(graph, batch)
        #: The samples that each group will have: the id, and the row of the batch it comes from.
        self._samples = _plan(graph.source, batch)
        self._slots: dict[str, Slot] = defaultdict(Slot, slots)
        self._metrics: dict[str, list[tuple[int, dict[str, float]]]] = defaultdict(list)
        self._ran = [node.name for node in graph.of_kind("source", "rows", "batch", "forward")]
        self._columns = GroupColumns(dict.fromkeys([self._base, *self._ran]), len(self._samples))
        if graph.source is None:
            rows = [(group, n) for group, ids in enumerate(self._samples) for n in range(len(ids))]
            self._columns.deliver("", range(len(self._samples)), rows, batch)

    def take(self, number: int, samples: Batch) -> None:
        """Hand a group to the nodes that wait for it."""
        rows = [(number, n) for n in range(len(samples))]
        self._columns.deliver(self._base, range(number, number + 1), rows, samples)

    async def run(self, node: Node) -> None:
        """Make all calls of a node, each as soon as its inputs are there."""
        # A node that works on rows waits for the columns it reads, group by group (`_work`). As a whole it waits only
        # for nodes that it is to follow without reading what they write (`after`).
        await self._columns.ended(self.graph.needs[node.name] if node.kind == "batch" else node.after)
        total = max(len(self._samples), 1)
        step = node.groups if node.kind == "rows" and node.groups else total
        ranges = [range(first, min(first + step, len(self._samples))) for first in range(0, total, step)]
        await all_of(self._work(node, groups) for groups in ranges)

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
        return Result(self._columns.everything(self._ran), metrics, self._calls.clock.timings)

    async def _work(self, node: Node, groups: range) -> None:
        """One call of a node: wait for its inputs, run it, deliver its outputs."""
        # In this order: a node that held its slot while it waits for columns would keep out the very node of the same
        # slot that writes them.
        rows, columns = await self._read(node, groups)
        if not rows and node.inputs:
            if node.kind == "batch":
                raise DataError(f"no row is left for node '{node.name}'")
            self._columns.deliver(node.name, groups, [], Batch.from_columns({}))
            return
        async with self._slots[node.slot].held_by((self, node.name)):
            value = await self._calls.call(node, columns, len(rows))
        kept, new = _written(node, columns, self._accept(node, value, len(rows)))
        self._columns.deliver(node.name, groups, [rows[index] for index in kept], new)

    async def _read(self, node: Node, groups: range) -> tuple[list[Row], Batch]:
        """The rows a call works on, and the columns it reads; also `id`, by which rows of its result are matched."""
        writers = {column: self.graph.writers.get(column, self._base) for column in node.reads}
        # "*" is every column of the samples and of all nodes before.
        whole = {self._base, *self.graph.before[node.name]} if ANY in node.inputs else set()
        sources = {*writers.values(), *whole} - {self._base}
        names = [self._base, *(name for name in self.graph.order if name in sources)]
        rows, written = await self._columns.gather(names, groups)
        columns: dict[str, Any] = {}
        for name, batch in written.items():
            reads = [column for column, writer in writers.items() if writer == name]
            if rows and (lacking := [c for c in reads if node.reads[c] and c not in batch]):
                raise DataError(f"node '{node.name}' reads {lacking}, which the samples lack: {batch!r}")
            tag = ["id"] if name == self._base else []
            reads = batch.columns if name in whole else [c for c in (*reads, *tag) if c in batch]
            columns.update({column: batch.arrow(column) for column in reads})
        return rows, Batch.from_columns(columns)

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
        the columns of their prompts. Where samples were recorded, all groups are there, and none comes."""
        if (node := self.graph.source) is None:
            return
        expected = {id_: (group, n) for group, ids in enumerate(self._samples) for n, (id_, _) in enumerate(ids)}
        waiting: dict[int, dict[int, Batch]] = {group: {} for group in range(len(self._samples))}
        prompts = self.batch if ANY in node.inputs else self.batch.select(node.reads)
        async with self._slots[node.slot].held_by((self, node.name)):
            progress, limit = time.monotonic(), node.deadline or self._calls.deadline
            async with aclosing(self._calls.stream(node, prompts)) as stream:
                async for value in stream:
                    samples = self._accept(node, value)
                    certain = [column for column, is_certain in {**node.writes, "id": True}.items() if is_certain]
                    if len(samples) and (lacking := [column for column in certain if column not in samples]):
                        raise DataError(f"samples of source '{node.name}' lack {lacking}: {samples!r}")
                    self._calls.clock.timings[node.name].rows += len(samples)
                    if len(samples):
                        progress = time.monotonic()
                    elif time.monotonic() - progress > limit:
                        raise self._calls.stalled(self._calls.work(node), what="gave no sample")
                    for id_, rows in _by_sample(samples):
                        group, n = expected.pop(id_, (-1, 0))
                        if group < 0:
                            raise RolloutError(f"source '{node.name}' gave sample '{id_}' twice, or unannounced")
                        waiting[group][n] = samples.take(rows)
                        if len(waiting[group]) == len(self._samples[group]):
                            yield group, self._in_order(group, waiting.pop(group))
        if expected:
            self._metrics[node.name].append((0, {f"{node.name}/missing/count": float(len(expected))}))
        for group, samples_of_it in waiting.items():
            yield group, self._in_order(group, samples_of_it)

    def _in_order(self, group: int, samples: Mapping[int, Batch]) -> Batch:
        order = sorted(samples)
        whole = Batch.concat(samples[n] for n in order)
        prompts = [self._samples[group][n][1] for n in order for _ in range(len(samples[n]))]
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


def _check_inputs(graph: Graph, batch: Batch) -> None:
    for node in graph.nodes.values():
        if graph.source is not None and node is not graph.source:
            continue  # works on samples, which bring columns of their own: checked when they are there
        for column in graph.external(node):
            if column not in batch:
                raise DataError(f"node '{node.name}' reads column '{column}', which the batch lacks: {batch!r}")


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
        groups = []
        for row, (id_, name) in enumerate(zip(ids, names, strict=True)):
            if row and name is not None and name == names[row - 1]:
                groups[-1].append((id_, row))
            else:
                groups.append([(id_, row)])
    if source is not None and (twice := _twice([id_ for group in groups for id_, _ in group])) is not None:
        raise DataError(f"two samples of source '{source.name}' would have the id '{twice}'")
    return groups


def _by_sample(samples: Batch) -> list[tuple[str, list[int]]]:
    """The rows of each sample by its id: one, or those of an episode, which come together, one behind the other."""
    if "episode" not in samples:
        return [(id_, [row]) for row, id_ in enumerate(samples["id"] if len(samples) else [])]
    episodes = samples["episode"]
    return [(id_, [*rows]) for id_, rows in groupby(range(len(samples)), key=episodes.__getitem__)]


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
