"""The next batch is read while the present one trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from verl.errors import DataError
from verl.user_calls import DEADLINE, HungError, LateError, Running, UserCode


@runtime_checkable
class Loader(Protocol):
    """Batches without end (of several tasks: mappings of tasks to batches), with a position that is saved."""

    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _as_it_is(batch: Any) -> Any:
    return batch


@contextmanager
def in_time(seconds: float) -> Iterator[None]:
    """Raises DataError if what is read is late."""
    try:
        yield
    except (LateError, HungError) as error:
        where = f" ({error})" if str(error) else ""
        raise DataError(f"the next prompts were not read within {seconds:g} s{where}: mend what reads them") from None


class Prefetch(Iterator[Any]):
    """Reads a loader one batch ahead, in a thread. `state_dict` is the position of the first batch that has not been
    returned yet, so that a batch read ahead of a checkpoint is read again after a resume.

    Args:
        prepare: what else is done with a batch in that thread.
        seconds: that it may take to read and prepare one.
    """

    def __init__(self, loader: Loader, prepare: Callable[[Any], Any] = _as_it_is, seconds: float = DEADLINE) -> None:
        self.loader, self.prepare, self.seconds = loader, prepare, seconds
        # The loader is one batch further than what was returned, so its own position is never the one to save: each
        # batch comes with the position after it, which counts once the batch is handed out.
        self._position = loader.state_dict()
        self._code = UserCode("the prompts")
        self._ahead: Running[tuple[Any, dict[str, Any]]] | None = None

    def __next__(self) -> Any:
        coming, self._ahead = self._ahead or self._code.begin(self.seconds, self._read), None
        with in_time(self.seconds):
            batch, self._position = coming.result()
            self._ahead = self._code.begin(self.seconds, self._read)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self._position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._ahead is not None:
            wait([self._ahead.future], timeout=self.seconds)
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
