"""Rows of several tasks: the column `task` says which one a row is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.batch import Batch
from verl.errors import DataError
from verl.names import check_known

#: Names the task of a row.
COLUMN = "task"


def by_task(rows: Any, names: Sequence[str]) -> dict[str, Any]:
    """The rows of each task, in their order; tasks without rows are left out.

    Args:
        rows: a `Batch` with a column `task`, mappings that have such a key, or a mapping of tasks to rows in any form.
        names: the tasks there are.

    Raises:
        DataError: a row names no task, or an unknown one.
    """
    if isinstance(rows, Mapping) and not isinstance(rows, Batch):
        for name in rows:
            _check(name, names, "the prompts")
        return {name: rows[name] for name in names if name in rows}
    if isinstance(rows, Batch):
        tasks: list[Any] = rows[COLUMN] if COLUMN in rows else [None] * len(rows)
    else:
        rows = list(rows)
        tasks = [row.get(COLUMN) if isinstance(row, Mapping) else None for row in rows]
    chosen: dict[str, list[int]] = {}
    for number, name in enumerate(tasks):
        _check(name, names, f"row {number}")
        chosen.setdefault(name, []).append(number)
    split = {name: chosen[name] for name in names if name in chosen}
    if isinstance(rows, Batch):
        return {name: _without_empty(rows.take(numbers)) for name, numbers in split.items()}
    return {name: [rows[number] for number in numbers] for name, numbers in split.items()}


def _check(name: Any, names: Sequence[str], where: str) -> None:
    if name is None:
        raise DataError(f"{where} names no task: of several tasks, each row says its own in the column '{COLUMN}'")
    check_known(f"{where}: there is no task", [name], names, DataError)


def _without_empty(rows: Batch) -> Batch:
    """Columns that only other tasks' rows have are null all through here."""
    return rows.select([name for name in rows.columns if rows.arrow(name).null_count < len(rows)])
