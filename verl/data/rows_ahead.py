"""Rows of any iterator that are read before they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from itertools import islice
from typing import Any

from verl.data.prefetch import in_time
from verl.user_calls import DEADLINE, Running, UserCode

_END = object()


def ahead(batches: Iterator[Any], prepare: Callable[[Any], Any], seconds: float) -> Iterator[Any]:
    """The same batches, prepared, each read while the one before is used; it may take so many seconds."""

    rows = RowsAhead(map(prepare, batches), seconds)
    rows.read(1)
    while (batch := rows.next(_END)) is not _END:
        rows.read(1)
        yield batch


class RowsAhead:
    """The rows of an iterator, some of which a thread reads before they are asked for. An error comes where its row
    would."""

    def __init__(self, rows: Iterator[Any], seconds: float = DEADLINE) -> None:
        self._rows, self._seconds, self._code = rows, seconds, UserCode("the prompts")
        self._waiting: deque[Any] = deque()
        self._ahead: Running[None] | None = None

    def next(self, default: Any) -> Any:
        """The next row; `default` where there is none."""
        if not self._waiting and self._ahead is not None:
            coming, self._ahead = self._ahead, None
            with in_time(self._seconds):
                coming.result()
        return self._waiting.popleft() if self._waiting else next(self._rows, default)

    def read(self, count: int) -> None:
        """Let so many rows be there when they are asked for."""
        if self._ahead is not None and self._ahead.future.done() and self._ahead.future.exception() is None:
            self._ahead = None
        lacking = count - len(self._waiting)
        if self._ahead is None and lacking > 0:
            self._ahead = self._code.begin(self._seconds, self._waiting.extend, islice(self._rows, lacking))

    def close(self) -> None:
        """Wait until nothing is being read."""
        if self._ahead is not None:
            wait([self._ahead.future], timeout=self._seconds)
