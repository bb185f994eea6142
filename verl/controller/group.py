"""What a controller holds of a role: its worker group. How a verb's rows are split and answers put together."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from verl.batch import Batch
from verl.training.micro_batch import balanced

logger = logging.getLogger(__name__)
W_co = TypeVar("W_co", covariant=True)


class WorkerGroup(Protocol[W_co]):
    """The workers of one role, reached as if they were one. Workers are made at the first verb."""

    role: str
    size: int

    def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Run a verb on the ranks of its mesh; data travel as the worker's method declares (`verl.workers.place`).

        Raises:
            ClusterError: a worker died, or a deadline passed.
            Exception: a worker's own, with the worker's traceback, role, rank and host.
        """


#: The columns that decide how rows are split.
SPLIT_BY = frozenset({"prompt_tokens", "response_tokens"})


def split_rows(batch: Batch, parts: int) -> list[list[int]]:
    """Row numbers for each data-parallel index, about equal in tokens; a part may be empty."""
    return [list(range(len(batch)))] if parts == 1 else balanced(batch, parts)


def join_rows(parts: Iterable[tuple[Sequence[int], Batch]]) -> Batch:
    """Answers put back into the order of the rows that were asked about."""
    parts = list(parts)
    order = [row for rows, _ in parts for row in rows]
    return Batch.concat(answer for _, answer in parts).take(sorted(range(len(order)), key=order.__getitem__))


@contextmanager
def noted(text: str) -> Iterator[None]:
    """Inside, an exception keeps its type and says where it arose: in a note, or before Python 3.11 in the log."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):
            error.add_note(text)
        else:
            logger.error("%s: %s", text, error)
        raise
