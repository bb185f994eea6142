"""The workers of all roles on one rank."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

from verl._host.ranks import who
from verl.cluster.rank_context import STREAMS, RankContext, RoleMeshes, dispatch_of

logger = logging.getLogger(__name__)


class Job(Protocol):
    """This rank's side of a job."""

    def context(self, role: RoleMeshes) -> RankContext | None:
        """This rank's context in a role; None if it has no part in it. Called on all ranks in the same order."""

    def collective(self, what: str) -> AbstractContextManager[None]:
        """Inside, a broken collective raises `BrokenCollectiveError`."""


class RankWorker:
    """Carries out the commands of the driver, one after another."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.workers: dict[int, tuple[str, Any]] = {}

    def carry_out(
        self, method: str, args: Sequence[Any], answers: bool, stream: Iterator[Any] | None = None
    ) -> Generator[Any, None, None]:
        """Run a `transport.Command`; yields its result item by item, unless it needs no answer."""
        items = getattr(self, method)(*args, *(() if stream is None else (stream,)))
        if answers:
            yield from items
        else:
            deque(items, maxlen=0)
        deque(stream or (), maxlen=0)  # what was not drawn here other ranks wait for

    def make(self, key: int, recipe: partial[Any], role: RoleMeshes) -> Iterable[Any]:
        """This rank's worker of a role, if it has one. Called on all ranks, in the same order."""
        with self._noted(role.role, "start"):
            context = self.job.context(role)
            if context is not None:
                self.workers[key] = (role.role, recipe(context=context))
                logger.info(
                    "process %d: rank %d of %d of role '%s'", os.getpid(), context.rank, context.size, context.role
                )
        return ()

    def call(
        self, key: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], *stream: Iterator[Any]
    ) -> Iterator[Any]:
        """Call a method of this rank's worker of a role, with the stream, if any, as its first argument; yields its
        items, or its one result."""
        role, worker = self.workers[key]
        with self._noted(role, method):
            answer = getattr(worker, method)(*stream, *args, **kwargs)
            if dispatch_of(type(worker), method).collect in STREAMS:
                yield from answer
            else:
                yield answer

    def run(self, function: Callable[..., Any], *args: Any) -> Iterable[Any]:
        """Call a function in this process."""
        name = getattr(function, "__name__", "everywhere")
        with self.job.collective(name), _noted(f"in '{name}', {who()}"):
            return (function(*args),)

    @contextmanager
    def _noted(self, role: str, method: str) -> Iterator[None]:
        with self.job.collective(f"{role}.{method}"), _noted(f"in role '{role}', {who()}, call '{method}'"):
            yield


@contextmanager
def _noted(text: str) -> Iterator[None]:
    """Inside, an exception keeps its type and says where it arose, in a note."""
    try:
        yield
    except Exception as error:
        error.add_note(text)
        raise


def stacks() -> str:
    """The stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(f"{names.get(i, i)}:\n{''.join(traceback.format_stack(frame))}" for i, frame in frames)
