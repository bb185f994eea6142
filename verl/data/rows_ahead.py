"""Rows of any iterator that are read before they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import islice
from typing import Any

from verl.threads import beside

_END = object()


def ahead(batches: Iterator[Any], prepare: Callable[[Any], Any]) -> Iterator[Any]:
    """The same batches, prepared, each read while the one before is used."""

    rows = RowsAhead(map(prepare, batches))
    rows.read(1)
    while (batch := rows.next(_END)) is not _END:
        rows.read(1)
        yield batch


class RowsAhead:
    """The rows of an iterator, some of which a thread reads before they are asked for. An error comes where its row
    would."""

    def __init__(self, rows: Iterator[Any]) -> None:
        self._rows = rows
        self._waiting: deque[Any] = deque()
        self._ahead: Future[None] | None = None

    def next(self, default: Any) -> Any:
        """The next row; `default` where there is none."""
        if not self._waiting and self._ahead is not None:
            coming, self._ahead = self._ahead, None
            coming.result()
        return self._waiting.popleft() if self._waiting else next(self._rows, default)

    def read(self, count: int) -> None:
        """Let so many rows be there when they are asked for."""
        if self._ahead is not None and self._ahead.done() and self._ahead.exception() is None:
            self._ahead = None
        if self._ahead is None and count > len(self._waiting):
            self._ahead = beside(self._extend, count - len(self._waiting), name="prefetch")

    def close(self) -> None:
        """Wait until nothing is being read."""
        if self._ahead is not None:
            self._ahead.exception()

    def _extend(self, count: int) -> None:
        for row in islice(self._rows, count):
            self._waiting.append(row)
