"""The next batch is read while the present one trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

from verl.threads import beside


@runtime_checkable
class Loader(Protocol):
    """Batches without end (of several tasks: mappings of tasks to batches), with a position that is saved."""

    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _as_it_is(batch: Any) -> Any:
    return batch


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
