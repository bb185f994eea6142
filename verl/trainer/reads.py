"""What a run's rewards and metrics read of its data, asked of the first rows before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from verl.batch import Batch
from verl.errors import DataError, RewardError
from verl.report.metrics import Metric
from verl.rewards.source import RewardSource, leaves

#: Rows that are looked at: a column that only later rows have is taken to be missing.
_ROWS = 256


def check_reads(data: Mapping[str, Batch], sources: Iterable[RewardSource], metrics: Iterable[Metric] = ()) -> None:
    """Raises DataError if the rows of one of some data, by their names, lack what a reward or a metric reads, or have
    a name in a column that none knows."""
    asked: list[Any] = [part for source in sources for part in {id(p): p for p in (source, *leaves(source))}.values()]
    asked += [metric.by_row for metric in metrics if metric.by_row is not None]
    checks: list[Callable[..., None]] = [leaf.check_data for leaf in asked if hasattr(leaf, "check_data")]
    for name, batch in data.items():
        for check in (part.check_values for part in asked if hasattr(part, "check_values")):
            check(name, batch)
        rows = list(islice(batch.rows(), _ROWS))
        for check in checks if rows else ():
            try:
                check(rows)
            except RewardError as error:
                raise DataError(f"{name}: {error}") from error
