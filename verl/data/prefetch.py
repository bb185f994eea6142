"""The next batch is read while the present one trains."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any, Protocol, runtime_checkable

from verl.batch import Batch


@runtime_checkable
class Loader(Protocol):
    """Batches without end (of several tasks: mappings of tasks to batches), with a position that is saved."""

    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Prefetch:
    """Reads a loader one batch ahead, in a thread. `state_dict` is the position of the first batch that has not been
    returned yet, so that a batch read ahead of a checkpoint is read again after a resume."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self._place = loader.state_dict()
        self._ahead: SimpleQueue[tuple[Batch, dict[str, Any]] | BaseException] | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        ahead, self._ahead = self._ahead or self._read(), None
        found = ahead.get()
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

    def _read(self) -> SimpleQueue[tuple[Batch, dict[str, Any]] | BaseException]:
        result: SimpleQueue[tuple[Batch, dict[str, Any]] | BaseException] = SimpleQueue()

        def read() -> None:
            try:
                batch = next(self.loader)
                result.put((batch, self.loader.state_dict()))
            except BaseException as error:  # raised where this batch is taken
                result.put(error)

        # A daemon: a data source that hangs does not keep the process from ending.
        threading.Thread(target=read, name="prefetch", daemon=True).start()
        return result
