"""The executor of one process: a group of one worker, called directly, so that breakpoints work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

W = TypeVar("W")


class LocalGroup(Generic[W]):
    """A worker group of one rank in this process.

    The worker is made at the first verb, not before: a handle is cheap until it is used.
    """

    def __init__(self, role: str, make_worker: Callable[[], W]) -> None:
        self.role = role
        self._make_worker = make_worker
        self._worker: W | None = None

    @property
    def worker(self) -> W:
        if self._worker is None:
            self._worker = self._make_worker()
        return self._worker

    def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Run a verb of the worker. An exception keeps its type and says in which role it arose."""
        try:
            return getattr(self.worker, verb)(*args, **kwargs)
        except Exception as error:
            _note(error, f"in role '{self.role}', verb '{verb}'")
            raise


def _note(error: Exception, text: str) -> None:
    # Exception.add_note is Python 3.11; 3.10 reads the same attribute from nobody, so it is only set there.
    if hasattr(error, "add_note"):
        error.add_note(text)
