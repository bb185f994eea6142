"""The workers of one role, as the driver holds them: how rows are split over ranks, and answers put together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import count
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from verl.batch import Batch
from verl.cluster.rank_context import ROLE, STREAMS, RoleMeshes, dispatch_of
from verl.cluster.transport import Command, Transport, run
from verl.errors import ConfigError, DataError, nearest
from verl.training.micro_batch import balanced

logger = logging.getLogger(__name__)
W_co = TypeVar("W_co", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")
_KEYS = count()


class RankGroup(Generic[W_co]):
    """The workers of one role, reached as if they were one. They are made at the first call: a handle is cheap until it
    is used."""

    def __init__(self, role: RoleMeshes, recipe: partial[W_co], transport: Transport) -> None:
        self.role, self.meshes, self.transport = role.role, role, transport
        self.size = len(role.ranks)
        self._recipe = recipe
        self._key: int | None = None

    @property
    def worker(self) -> W_co:
        """The worker in this process."""
        key = self._make()
        return self.transport.worker.workers[key][1]  # type: ignore[no-any-return]

    def _make(self) -> int:
        if self._key is None:
            self.transport.start()  # under torchrun the script of another rank ends here
            key = next(_KEYS)
            command = Command("make", (key, self._recipe, self.meshes), False)
            dict(run(self.transport, dict.fromkeys(range(self.transport.size), command), f"{self.role}.start"))
            self._key = key
        return self._key

    def call(self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a call on the ranks of its mesh; data travel as the worker's method declares (`Dispatch`).

        Args:
            method: of the worker's class or of a base: `group.call(ActorWorker.update, parts, plan)`. A worker whose
                class overrides it runs its own.

        Raises:
            ClusterError: a worker died, or a deadline passed.
            Exception: a worker's own, with the worker's traceback, role, rank and host.
        """
        name: str = getattr(method, "__name__", method)  # type: ignore[arg-type]
        what, spec = f"{self.role}.{name}", dispatch_of(self._recipe.func, name)  # type: ignore[arg-type]
        known = (ROLE, *self.meshes.meshes)
        if spec.mesh not in known:
            raise ConfigError(
                f"'{what}' is a call of mesh '{spec.mesh}', and this role has no such mesh: {nearest(spec.mesh, known)}"
            )
        if spec.split == "rows" and not (args and isinstance(args[0], Batch)):
            got = type(args[0]).__name__ if args else "none"
            raise DataError(f"'{what}' is split by rows: its first argument, not by keyword, is a Batch; got {got}")
        key, mesh = self._make(), self.meshes.mesh(spec.mesh)
        first: Any = args[0] if args and isinstance(args[0], Batch | Iterator) else None
        order = (key, name, args if first is None else args[1:], kwargs)
        of_rank: Mapping[int, Any] = dict.fromkeys(mesh.ranks)
        by_rows, answering = spec.split == "rows", mesh.answering()
        if by_rows:  # a data-parallel index gets its rows, perhaps none, and the first rank of those with them answers
            size = mesh.layout.data_size
            rows = balanced(first, size) if size > 1 else [range(len(first))]
            of_rank = {rank: rows[(mesh.rows(rank) or (0, 1))[0]] for rank in mesh.ranks}
        else:
            answering = answering[:1]
        answers_here = () if spec.collect == "none" else answering
        kind, is_stream = ("stream", True) if spec.collect in STREAMS else ("call", False)
        commands = {rank: Command(kind, order, rank in answers_here, part) for rank, part in of_rank.items()}
        # Ranks that share rows generate them together: while the caller pauses this stream they wait in a collective,
        # and the transport refuses other calls to them.
        collective = spec.collect == "batches" and len(answering) < mesh.size
        answers = run(self.transport, commands, what, first=first, is_independent=by_rows, collective=collective)
        if is_stream:
            return _items(answers)  # type: ignore[return-value]
        began = time.perf_counter()
        by_rank = dict(answers)
        logger.debug("%s took %.3f s", what, time.perf_counter() - began)
        if spec.collect != "rows":
            return by_rank.get(answering[0])  # type: ignore[return-value]
        for rank in answering:
            answer, part = by_rank[rank], of_rank[rank]
            if not isinstance(answer, Batch) or len(answer) != len(part):
                got = f"{len(answer)} rows" if isinstance(answer, Batch) else type(answer).__name__
                raise DataError(
                    f"'{what}' collects rows, and rank {rank} answered {len(part)} rows with {got}: return a Batch of "
                    "one row for each that came"
                )
        return joined(rows, [by_rank[rank] for rank in answering])  # type: ignore[return-value]


def _items(answers: Generator[tuple[int, Any], None, None]) -> Iterator[Any]:
    with closing(answers):
        for _, item in answers:
            yield item
            del item  # a shard is let go before the next one is made


def joined(rows: Sequence[Sequence[int]], answers: Sequence[Batch]) -> Batch:
    """Concatenate the answers about parts of a batch, in the order of its rows. Answers without rows are dropped, since
    they may lack columns; if all are empty, the first one counts."""
    if len(answers) == 1:
        return answers[0]
    order = [row for part in rows for row in part]
    filled = [answer for answer in answers if len(answer)] or answers[:1]
    return Batch.concat(filled).take(sorted(range(len(order)), key=order.__getitem__))
