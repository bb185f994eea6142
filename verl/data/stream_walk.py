"""A position in a stream of prompts, epoch after epoch; a part of `PromptLoader`."""

from __future__ import annotations

import json
from typing import Any

from verl.batch import Batch
from verl.data.cursor import saved_count
from verl.data.prompts import PromptStream
from verl.data.rows_ahead import RowsAhead
from verl.errors import DataError
from verl.user_calls import DEADLINE


class StreamWalk:
    def __init__(self, data: PromptStream) -> None:
        self.data = data
        self.epoch = self.position = 0
        self._rows: RowsAhead | None = None
        self._mark: Any = None  # of the last row
        #: Seconds that rows may take which are read ahead; None: none are.
        self.reads_ahead: float | None = None

    def visit(self, count: int) -> tuple[list[tuple[int, int]], Batch]:
        visits: list[tuple[int, int]] = []
        rows: list[dict[str, Any]] = []
        barren = 0
        while len(rows) < count:
            if self._rows is None:
                self._rows = RowsAhead(
                    self.data.marked_rows(self.epoch, self.position, self._mark), self.reads_ahead or DEADLINE
                )
            number, row, mark = self._rows.next((-1, {}, None))
            if row:
                visits.append((self.epoch, number))
                rows.append(row)
                self.position, self._mark, barren = number + 1, mark, 0
                continue
            barren += 1
            if barren == 2:
                raise DataError(
                    f"{self.data.name} gives no prompts: it is empty, can be read only once, or all are dropped"
                )
            self.epoch, self.position, self._mark, self._rows = self.epoch + 1, 0, None, None
        if self._rows is not None and self.reads_ahead:
            self._rows.read(count)
        return visits, Batch.from_rows(rows)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"epoch": self.epoch, "position": self.position, "stream": True}
        try:
            json.dumps(self._mark, allow_nan=False)
        except (TypeError, ValueError):  # a state that JSON cannot hold: its rows are skipped
            return state
        return state if self._mark is None else {**state, "mark": self._mark}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state.get("stream"):
            raise DataError(f"the saved place belongs to a data set with a length, {self.data.name} is a stream")
        epoch, position = saved_count(state, "epoch"), saved_count(state, "position")
        if self._rows is not None:
            self._rows.close()
        self.epoch, self.position, self._mark, self._rows = epoch, position, state.get("mark"), None
