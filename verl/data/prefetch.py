"""Rows and batches that are read before they are asked for, while the present ones train."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from verl._host.user_calls import DEADLINE, HungError, LateError, Running, UserCode
from verl.errors import DataError

_END = object()


@runtime_checkable
class Loader(Iterator[Any], Protocol):
    """Batches without end (of several tasks: mappings of tasks to batches), with a position that is saved."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@contextmanager
def in_time(seconds: float) -> Iterator[None]:
    """Raises DataError if what is read is late."""
    try:
        yield
    except (LateError, HungError) as error:
        raise DataError(f"the next prompts were not read in time ({error}): mend what reads them") from None


class RowsAhead(Iterator[Any]):
    """The rows of an iterator, some of which a thread reads before they are asked for: as many as `read` says, or in
    iteration the one after each. An error comes where its row would."""

    def __init__(self, rows: Iterator[Any], seconds: float = DEADLINE) -> None:
        self._rows, self.seconds, self._code = rows, seconds, UserCode("the prompts")
        self._waiting: deque[Any] = deque()
        self._ahead: Running[None] | None = None

    def __next__(self) -> Any:
        self.read(1)
        if (row := self.next(_END)) is _END:
            raise StopIteration
        self.read(1)
        return row

    def next(self, default: Any) -> Any:
        """The next row, or `default` at the end."""
        if not self._waiting and self._ahead is not None:
            coming, self._ahead = self._ahead, None
            with in_time(self.seconds):
                coming.in_time()
        return self._waiting.popleft() if self._waiting else next(self._rows, default)

    def read(self, count: int) -> None:
        """Let this many rows be there when they are asked for."""
        if self._ahead is not None and self._ahead.done() and self._ahead.exception() is None:
            self._ahead = None
        lacking = count - len(self._waiting)
        if self._ahead is None and lacking > 0:
            with in_time(self.seconds):
                self._ahead = self._code.begin(self.seconds, self._waiting.extend, islice(self._rows, lacking))

    def close(self) -> None:
        """Wait until nothing is being read."""
        if self._ahead is not None:
            wait([self._ahead], timeout=self.seconds)


class Prefetch(RowsAhead):
    """Reads a loader one batch ahead, in a thread. `state_dict` is the position of the first batch that has not been
    returned yet, so that a batch read ahead of a checkpoint is read again after a resume.

    Args:
        prepare: what else is done with a batch in that thread; None: nothing.
        seconds: that it may take to read and prepare one.
    """

    def __init__(self, loader: Loader, prepare: Callable[[Any], Any] | None = None, seconds: float = DEADLINE) -> None:
        super().__init__(iter(self._read, None), seconds)
        self.loader, self.prepare = loader, prepare
        # The loader is one batch further than what was returned, so its own position is never the one to save: each
        # batch comes with the position after it, which counts once the batch is handed out.
        self._position = loader.state_dict()

    def __next__(self) -> Any:
        batch, self._position = super().__next__()
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self._position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().close()
        self._ahead = None
        self._waiting.clear()
        self.loader.load_state_dict(state)
        self._position = state

    def close(self) -> None:
        """Set the loader back to the position reached here: the batch that was read ahead is its next one again."""
        if self._ahead is not None:
            self.load_state_dict(self._position)

    def _read(self) -> tuple[Any, dict[str, Any]]:
        """The next batch, prepared, and the loader's position after it."""
        batch = next(self.loader)
        return batch if self.prepare is None else self.prepare(batch), self.loader.state_dict()
