"""The workers of all roles on one rank."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from verl._host.ranks import who
from verl.cluster.rank_context import RankContext, RoleMeshes

logger = logging.getLogger(__name__)


class RankWorker:
    """Carries out the commands of the driver, one after another. This one is the only rank; a `World` is one of many.

    Args:
        device: where this rank's tensors live.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.workers: dict[int, tuple[str, Any]] = {}

    def context(self, role: RoleMeshes) -> RankContext | None:
        """This rank's context in a role; None if it has no part in it. All ranks call this in the same order."""
        return RankContext(role=role.role, device=self.device)

    @contextmanager
    def collective(self, what: str, where: str) -> Iterator[None]:
        """Inside, an exception keeps its type and says where it arose, in a note; a collective of a `World` that breaks
        raises `BrokenCollectiveError`."""
        try:
            yield
        except Exception as error:
            error.add_note(where)
            raise

    def carry_out(
        self, method: str, args: Sequence[Any], answers: bool, rows: Sequence[int] | None, first: Any = None
    ) -> Generator[Any, None, None]:
        """Run a `transport.Command`; yields its result item by item, unless it needs no answer.

        Args:
            first: goes before the other arguments, see `Transport.send`.
        """
        if rows is not None and len(rows) < len(first):
            first = first.take(rows)
        items = getattr(self, method)(*args, *(() if first is None else (first,)))
        if answers:
            yield from items
        else:
            deque(items, maxlen=0)
        if isinstance(first, Iterator):
            deque(first, maxlen=0)  # what was not drawn here other ranks wait for

    def make(self, key: int, recipe: partial[Any], role: RoleMeshes) -> Iterable[Any]:
        """This rank's worker of a role, if it has one. Called on all ranks, in the same order."""
        with self.collective(f"{role.role}.start", f"in role '{role.role}', {who()}, call 'start'"):
            context = self.context(role)
            if context is not None:
                self.workers[key] = (role.role, recipe(context=context))
                logger.info(
                    "process %d: rank %d of %d of role '%s'", os.getpid(), context.rank, context.size, context.role
                )
        return ()

    def call(self, key: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], *first: Any) -> Iterator[Any]:
        """Call a method of this rank's worker of a role; yields its items, or its one result."""
        role, worker = self.workers[key]
        with self.collective(f"{role}.{method}", f"in role '{role}', {who()}, call '{method}'"):
            answer = getattr(worker, method)(*first, *args, **kwargs)
            if isinstance(answer, Iterator):
                yield from answer
            else:
                yield answer

    #: The same, whose items a transport sends one by one.
    stream = call

    def run(self, function: Callable[..., Any], *args: Any) -> Iterable[Any]:
        """Call a function in this process."""
        name = getattr(function, "__name__", "everywhere")
        with self.collective(name, f"in '{name}', {who()}"):
            return (function(*args),)


def stacks() -> str:
    """The stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(f"{names.get(i, i)}:\n{''.join(traceback.format_stack(frame))}" for i, frame in frames)
