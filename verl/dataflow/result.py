"""The result of a run of a graph: all columns, the metrics of its nodes, and when each node worked."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from verl.batch import Batch
from verl.errors import nearest

#: Seconds; the steps of an engine are no spans of their own.
JOINED = 1e-3


@dataclass
class Timing:
    """When a node worked, in seconds since the run began; `busy`: while at least one of its calls was running.

    `spans` are the (start, end) of that; calls less than `JOINED` seconds apart are one span. `role`: whose work it is.
    """

    role: str
    busy: float = 0.0
    calls: int = 0
    rows: int = 0
    spans: list[tuple[float, float]] = field(default_factory=list)


class Clock:
    """The timings of the nodes of one run."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.epoch = time.time()
        self.timings: dict[str, Timing] = {}
        self._active: dict[str, int] = defaultdict(int)
        self._since: dict[str, float] = {}

    @contextmanager
    def call(self, name: str, rows: int, role: str = "") -> Iterator[None]:
        """The node of this name works on this many rows inside, for a role (its name, if none is said)."""
        now = time.perf_counter() - self.began
        timing = self.timings.setdefault(name, Timing(role or name))
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
                start, end = self._since[name], time.perf_counter() - self.began
                timing.busy += end - start
                if timing.spans and start - timing.spans[-1][1] < JOINED:
                    start, _ = timing.spans.pop()
                timing.spans.append((start, end))


@dataclass(frozen=True)
class Result:
    """The result of a run.

    batch: all rows, in the order of the ids, with all columns; null where a node dropped the row.
    metrics: of all nodes. Over the calls of one node, names ending in "/max" combine by maximum, in "/count" by sum,
        others by the mean over rows.
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
