"""The next batch is read while the present one trains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar, runtime_checkable

T = TypeVar("T")


@runtime_checkable
class Loader(Protocol):
    """Batches without end (of several tasks: mappings of tasks to batches), with a position that is saved."""

    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches, each read while the one before is used."""
    coming = _read(batches, lambda: None)
    while True:
        found = coming.get()
        if isinstance(found, StopIteration):
            return
        if isinstance(found, BaseException):
            raise found
        coming = _read(batches, lambda: None)
        yield found[0]


def _read(source: Iterator[Any], place: Callable[[], T]) -> SimpleQueue[tuple[Any, T] | BaseException]:
    """Begin to read the next batch in a thread, and the place behind it."""
    result: SimpleQueue[tuple[Any, T] | BaseException] = SimpleQueue()

    def read() -> None:
        try:
            batch = next(source)
            result.put((batch, place()))
        except BaseException as error:  # raised where this batch is taken
            result.put(error)

    # A daemon: a data source that hangs does not keep the process from ending.
    threading.Thread(target=read, name="prefetch", daemon=True).start()
    return result


class Prefetch:
    """Reads a loader one batch ahead, in a thread. `state_dict` is the position of the first batch that has not been
    returned yet, so that a batch read ahead of a checkpoint is read again after a resume."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self._place = loader.state_dict()
        self._ahead: SimpleQueue[tuple[Any, dict[str, Any]] | BaseException] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        coming, self._ahead = self._ahead or self._read(), None
        found = coming.get()
        if isinstance(found, BaseException):
            raise found
        batch, self._place = found
        self._ahead = self._read()
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self._place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._ahead is not None:
            self._ahead.get()
            self._ahead = None
        self.loader.load_state_dict(state)
        self._place = state

    def close(self) -> None:
        """Put the loader where this has come to: the batch that was read ahead is its next one again."""
        if self._ahead is not None:
            self.load_state_dict(self._place)

    def _read(self) -> SimpleQueue[tuple[Any, dict[str, Any]] | BaseException]:
        return _read(self.loader, self.loader.state_dict)
