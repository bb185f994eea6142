"""The next batch is read while the present one trains."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from verl.threads import beside

_END = object()


@runtime_checkable
class Loader(Protocol):
    """Batches without end (of several tasks: mappings of tasks to batches), with a position that is saved."""

    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _as_it_is(batch: Any) -> Any:
    return batch


def ahead(batches: Iterator[Any], prepare: Callable[[Any], Any] = _as_it_is) -> Iterator[Any]:
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


class Prefetch:
    """Reads a loader one batch ahead, in a thread. `state_dict` is the position of the first batch that has not been
    returned yet, so that a batch read ahead of a checkpoint is read again after a resume.

    Args:
        prepare: what else is done with a batch in that thread.
    """

    def __init__(self, loader: Loader, prepare: Callable[[Any], Any] = _as_it_is) -> None:
        self.loader, self.prepare = loader, prepare
        # The loader is one batch further than what was returned, so its own position is never the one to save: each
        # batch comes with the position after it, which counts once the batch is handed out.
        self._position = loader.state_dict()
        self._ahead: Future[tuple[Any, dict[str, Any]]] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        coming, self._ahead = self._ahead or beside(self._read, name="prefetch"), None
        batch, self._position = coming.result()
        self._ahead = beside(self._read, name="prefetch")
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self._position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._ahead is not None:
            self._ahead.exception()  # waits for it
            self._ahead = None
        self.loader.load_state_dict(state)
        self._position = state

    def close(self) -> None:
        """Set the loader back to the position reached here: the batch that was read ahead is its next one again."""
        if self._ahead is not None:
            self.load_state_dict(self._position)

    def _read(self) -> tuple[Any, dict[str, Any]]:
        """The next batch, prepared, and the loader's position after it."""
        return self.prepare(next(self.loader)), self.loader.state_dict()
