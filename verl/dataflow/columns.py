"""The columns that the nodes of a run have written so far, group by group.

A row is known by the number of its group and its number within that: a group is the samples of one prompt, in the order
of their ids, and how many rows it has is known once it is there. A node's columns of a group are a future, so that a
reader waits for just the groups it works on.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import pyarrow as pa

from verl.batch import Batch
from verl.errors import DataError

#: The number of a row's group, and its number in the group.
Row: TypeAlias = tuple[int, int]
#: What one node wrote of one group: rows, ascending, and their columns.
Written: TypeAlias = tuple[Sequence[Row], Batch]


class GroupColumns:
    """Futures of written columns, by node and group.

    Args:
        writers: their names; the first is the base, which has all the rows.
        groups: how many there are.
    """

    def __init__(self, writers: Iterable[str], groups: int) -> None:
        loop = asyncio.get_running_loop()
        self._written = {name: [loop.create_future() for _ in range(groups)] for name in writers}
        self._base = next(iter(self._written))

    def deliver(self, name: str, groups: range, rows: Sequence[Row], columns: Batch) -> None:
        """Hand out what `name` wrote of some groups; `rows` are those of `columns`, ascending."""
        for group in groups:
            low, high = (bisect_left(rows, (number, 0)) for number in (group, group + 1))
            part = columns.slice(low, high - low) if columns.columns else columns
            self._written[name][group].set_result((rows[low:high], part))

    async def ended(self, names: Iterable[str]) -> None:
        """Wait until these have written all groups."""
        await asyncio.gather(*(asyncio.shield(group) for name in names for group in self._written[name]))

    async def gather(self, names: Sequence[str], groups: range) -> tuple[list[Row], dict[str, Batch]]:
        """Wait for groups of some writers: the rows that all of them have, and each one's columns of those."""
        waits = [asyncio.shield(self._written[name][group]) for name in names for group in groups]
        done = iter(await asyncio.gather(*waits))
        written = {name: _joined([next(done) for _ in groups]) for name in names}
        common = set.intersection(*(set(rows) for rows, _ in written.values()))
        rows = [row for row in written[names[0]][0] if row in common]
        return rows, {name: _taken(columns, present, rows) for name, (present, columns) in written.items()}

    def everything(self, names: Iterable[str]) -> Batch:
        """All rows of the base with the columns of these writers; null where one of them dropped the row.

        Raises:
            DataError: two writers wrote the same column, which at least one of them had not declared.
        """
        rows, whole = _joined([future.result() for future in self._written[self._base]])
        writers = dict.fromkeys(whole.columns, self._base)
        for name in names:
            if name == self._base:
                continue
            present, columns = _joined([future.result() for future in self._written[name]])
            for column in columns.columns:
                if column in writers:
                    raise DataError(f"column '{column}' was written by '{name}' and by '{writers[column]}'")
                writers[column] = name
            whole = whole.add(_taken(columns, present, rows))
        return whole


def _joined(parts: Sequence[Written]) -> tuple[list[Row], Batch]:
    return [row for rows, _ in parts for row in rows], Batch.concat(columns for _, columns in parts)


def _taken(columns: Batch, present: Sequence[Row], rows: Sequence[Row]) -> Batch:
    """These rows, null where `present` lacks one."""
    if not columns.columns or list(present) == list(rows):
        return columns
    index_of = {row: index for index, row in enumerate(present)}
    return Batch(columns.table.take(pa.array([index_of.get(row) for row in rows], pa.int64())))
