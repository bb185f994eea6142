"""A process with one rank of the job, and that rank's workers of all roles. torchrun or Ray starts it."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from verl._host.ranks import who
from verl.cluster.group import STREAMS
from verl.cluster.rank_context import RoleMeshes, dispatch_of, noted
from verl.cluster.world import World

logger = logging.getLogger(__name__)


class RankWorker:
    """The workers of one rank.

    Args:
        world: this rank's side of the job.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._workers: dict[int, tuple[str, Any]] = {}

    def make(self, key: int, recipe: partial[Any], role: RoleMeshes) -> None:
        """This rank's worker of a role, if it has one. Called on all ranks, in the same order."""
        with self._noted(role.role, "start"):
            context = self.world.context(role)
            if context is not None:
                self._workers[key] = (role.role, recipe(context=context))
                logger.info(
                    "process %d: rank %d of %d of role '%s'", os.getpid(), context.rank, context.size, context.role
                )

    def execute(self, key: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
        """Results that a call of this rank's worker of a role yields, or the one value that it returns."""
        role, worker = self._workers[key]
        with self._noted(role, method):
            answer = getattr(worker, method)(*args, **kwargs)
            yield from answer if dispatch_of(type(worker), method).collect in STREAMS else (answer,)

    def run(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """A function in this process."""
        name = getattr(function, "__name__", "everywhere")
        with self.world.collective(name), noted(f"in '{name}', {who()}"):
            return function(*args)

    @contextmanager
    def _noted(self, role: str, method: str) -> Iterator[None]:
        with self.world.collective(f"{role}.{method}"), noted(f"in role '{role}', {who()}, call '{method}'"):
            yield


def stacks() -> str:
    """The stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(f"{names.get(i, i)}:\n{''.join(traceback.format_stack(frame))}" for i, frame in frames)
