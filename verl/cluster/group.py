"""The worker group of a role, as a controller holds it: how the rows of a call are split over ranks that torchrun or
Ray has started, and how their answers are put together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, Protocol, TypeVar

from verl.batch import Batch
from verl.cluster.rank_context import RoleMeshes, check_answer, check_call, dispatch_of, name_of, timed
from verl.errors import BrokenCollectiveError, ClusterError
from verl.training.micro_batch import balanced

logger = logging.getLogger(__name__)
W_co = TypeVar("W_co", covariant=True)
W = TypeVar("W")
P = ParamSpec("P")
R = TypeVar("R")

#: Seconds in which the other ranks may end once one has failed.
GRACE = 3.0
#: In the place of the stack of a rank whose process does not run.
NO_ANSWER = "no answer"
#: What is collected item by item.
STREAMS = ("batches", "shards")


class Workers(Protocol[W_co]):
    """The workers of one role, reached as if they were one. Workers are made at the first call."""

    role: str
    size: int

    def call(self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a call on the ranks of its mesh; data travel as the worker's method declares (`Dispatch`).

        Args:
            method: of the worker's class or of a base: `group.call(ActorWorker.update, parts, plan)`. A worker whose
                class overrides it runs its own.

        Raises:
            ClusterError: a worker died, or a deadline passed.
            Exception: a worker's own, with the worker's traceback, role, rank and host.
        """


@dataclass(frozen=True)
class Call:
    """A call on its way to the ranks of its mesh.

    Attributes:
        role: the key of the role's workers.
        what: "ROLE.METHOD", for messages.
        rows: the ranks of the mesh in its order, each with its rows of the first argument; None: all of it.
        answering: the ranks whose answers count.
        is_stream: whether answers come item by item.
        is_independent: ranks do not wait for each other in it, so that the failure of some leaves the others in step.
    """

    role: int
    what: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: Mapping[int, Sequence[int] | None]
    answering: Collection[int]
    is_stream: bool
    is_independent: bool


class Job(Protocol):
    """Processes with a rank each: how orders reach them, and answers come back.

    Attributes:
        timeout: seconds that ranks wait for each other.
        ended: why the processes were ended; None: they were not.
    """

    timeout: float
    ended: str | None

    @property
    def has_started(self) -> bool: ...
    @property
    def devices_a_machine(self) -> int:
        """Most devices of the placement's kind that a machine has for its ranks."""

    def start(self) -> None:
        """Start or join the processes, which the first call does otherwise."""

    def make(self, recipe: partial[Any], role: RoleMeshes) -> int:
        """Make the workers of a role; the key of its calls."""

    def run(self, call: Call) -> Iterator[tuple[int, Any]]:
        """Each answer with its rank, as they come, and perhaps that of this rank although it is not asked for; all
        ranks have ended after the last one."""

    def everywhere(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a function on every rank with the arguments of each; the answers by rank."""

    def who(self, rank: int) -> str:
        """A rank, for messages."""

    def stacks(self) -> Mapping[int, str]:
        """The stack of every rank; `NO_ANSWER` of one that does not say so within `GRACE` seconds."""

    def close(self, reason: str = ...) -> None:
        """End the processes."""


class RankGroup(Generic[W]):
    """A worker group on the ranks of a job. See `Workers`."""

    def __init__(self, role: RoleMeshes, recipe: partial[W], job: Job) -> None:
        self.role, self.meshes, self.job = role.role, role, job
        self.size = len(role.ranks)
        self._recipe = recipe
        self._key: int | None = None

    def call(self, method: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        name = name_of(method)
        spec, what = dispatch_of(self._recipe.func, name), f"{self.role}.{name}"  # type: ignore[arg-type]
        check_call(what, spec, self.meshes.meshes, args)
        if self._key is None:
            self._key = self.job.make(self._recipe, self.meshes)
        mesh = self.meshes.mesh(spec.mesh)
        rows: dict[int, Sequence[int] | None] = dict.fromkeys(mesh.ranks)
        if spec.split == "rows":
            size = mesh.layout.data_size  # a part may be empty
            parts = [list(range(len(args[0])))] if size == 1 else balanced(args[0], size)
            rows = {rank: parts[index] for rank, (index, _) in ((r, mesh.rows(r) or (0, 1)) for r in mesh.ranks)}
        answering = mesh.answering() if spec.collect in ("rows", "batches") else mesh.answering()[:1]
        call = Call(
            role=self._key,
            what=what,
            method=name,
            args=args,
            kwargs=kwargs,
            rows=rows,
            answering=() if spec.collect == "none" else answering,
            is_stream=spec.collect in STREAMS,
            is_independent=spec.split == "rows",
        )
        if call.is_stream:
            return (item for rank, item in self.job.run(call) if rank in call.answering)
        with timed(what):
            answers = dict(self.job.run(call))
        if spec.collect == "rows":
            asked = [(rows[rank] or [], rank) for rank in answering]
            for part, rank in asked:
                check_answer(what, rank, len(part), answers[rank])
            return join_rows([(part, answers[rank]) for part, rank in asked])
        return None if spec.collect == "none" else answers[answering[0]]


def died(who: str, where: str, why: str) -> ClusterError:
    """The error about a rank whose process is gone."""
    return ClusterError(
        f"{who} died {where}: {why}. The run cannot go on without it; the same command resumes it from its last "
        "checkpoint"
    )


def stalled(job: Job, ranks: Sequence[int], what: str, limit: float) -> ClusterError:
    """The error of a missed deadline. The stacks of all ranks are logged, and the job ended.

    Args:
        ranks: those that have not answered. If some of them say no stack either, these are named alone: the others wait
            for them.
    """
    stacks = job.stacks()
    for rank, stack in stacks.items():
        logger.error("%s stands at:\n%s", job.who(rank), stack)
    names = "; ".join(map(job.who, [rank for rank in ranks if stacks[rank] == NO_ANSWER] or ranks))
    reason = f"'{what}' did not end within {limit:g} s: waited for {names}; stacks of all ranks are in the log"
    job.close(reason)
    return ClusterError(reason)


def raise_cause(
    job: Job, errors: Mapping[int, Exception], late: Collection[int], what: str, is_broken: bool
) -> NoReturn:
    """Raise, of the errors of several ranks, that of the first rank which did not just wait for another one; if all of
    them did, those that have not ended are to blame.

    Args:
        late: the ranks that have not ended.
        is_broken: ranks may no longer be in step, so that the job is ended, as where some are late.
    """
    if late and all(isinstance(error, BrokenCollectiveError) for error in errors.values()):
        raise stalled(job, sorted(late), what, job.timeout) from next(iter(errors.values()), None)
    first = (errors[rank] for rank in sorted(errors))
    cause = min(first, key=lambda error: isinstance(error, BrokenCollectiveError))
    if late or is_broken:
        job.close(f"{type(cause).__name__}: {cause}")
    raise cause from cause.__cause__


def join_rows(parts: Sequence[tuple[Sequence[int], Batch]]) -> Batch:
    """Answers put back into the order of the rows that were asked about. Columns are those of answers with rows, or,
    where none has any, of the first."""
    order = [row for rows, _ in parts for row in rows]
    answers = [answer for rows, answer in parts if rows] or [parts[0][1]]
    return Batch.concat(answers).take(sorted(range(len(order)), key=order.__getitem__))
