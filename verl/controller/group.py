"""What a controller holds of a role: its worker group. How a verb's rows are split and answers put together."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from verl.batch import Batch
from verl.errors import ConfigError, DataError, nearest
from verl.training.micro_batch import balanced
from verl.workers.place import ROLE, Verb

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


def join_rows(parts: Sequence[tuple[Sequence[int], Batch]]) -> Batch:
    """Answers put back into the order of the rows that were asked about. Columns are those of answers with rows, or,
    where none has any, of the first."""
    order = [row for rows, _ in parts for row in rows]
    answers = [answer for rows, answer in parts if rows] or [parts[0][1]]
    return Batch.concat(answers).take(sorted(range(len(order)), key=order.__getitem__))


def check_call(what: str, spec: Verb, meshes: Iterable[str], args: Sequence[Any]) -> None:
    """Refuse what no rank could do.

    Args:
        what: "ROLE.VERB", for messages.
        meshes: those of the role.

    Raises:
        ConfigError: the verb is of a mesh that the role has not.
        DataError: it is split by rows, and its first argument is no batch.
    """
    known = (ROLE, *meshes)
    if spec.mesh not in known:
        raise ConfigError(
            f"'{what}' is a verb of mesh '{spec.mesh}', which the role has not: {nearest(spec.mesh, known)}"
        )
    if spec.split == "rows" and not (args and isinstance(args[0], Batch)):
        got = type(args[0]).__name__ if args else "none"
        raise DataError(f"'{what}' is split by rows: its first argument, not by keyword, is a Batch; got {got}")


def check_answer(what: str, rank: int, rows: int, answer: Any) -> None:
    """Of a verb that collects rows.

    Raises:
        DataError: a rank's answer is not one row for each that it got.
    """
    if not isinstance(answer, Batch) or len(answer) != rows:
        found = f"{len(answer)} rows" if isinstance(answer, Batch) else type(answer).__name__
        raise DataError(
            f"'{what}' collects rows, and rank {rank} answered {rows} rows with {found}: return a Batch of one row for "
            "each that came"
        )


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
