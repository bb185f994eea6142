"""The executor under torchrun: the driver is replicated. Every verb takes the whole batch at every rank, each rank
computes its part, and the collected batch is gathered to all ranks as Arrow IPC, members of the role or not. So user
code sees one table everywhere."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

from verl.batch import Batch
from verl.controller.group import check_answer, check_call, join_rows, noted, split_rows
from verl.controller.ranks import who
from verl.controller.world import Layout, World
from verl.shard import Shard
from verl.workers.place import Verb, verb_of
from verl.workers.streams import broadcast_shards

W = TypeVar("W")


class TorchrunGroup(Generic[W]):
    """A worker group whose ranks are processes of this torchrun job. See `WorkerGroup`."""

    def __init__(self, role: str, recipe: partial[W], layout: Layout, join: Callable[[], World]) -> None:
        self.role, self.layout, self._join = role, layout, join
        self.size = len(layout.ranks)
        self._recipe = recipe
        self._is_made = False
        self._worker: W | None = None

    @property
    def world(self) -> World:
        return self._join()

    @property
    def worker(self) -> W | None:
        """The worker of this rank; None where the role has none. All ranks must ask for it together."""
        if not self._is_made:
            place = self.world.place(self.layout)
            self._worker = None if place is None else self._recipe(place=place)
            self._is_made = True
        return self._worker

    def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        spec = verb_of(self._recipe.func, verb)  # type: ignore[arg-type]
        check_call(f"{self.role}.{verb}", spec, self.layout.meshes, args)
        parts: list[list[int]] = []
        digest = 0
        with self.world.collective(f"{self.role}.{verb}"), noted(f"in role '{self.role}', {who()}, verb '{verb}'"):
            worker = self.worker
            share = self.layout.share(spec.mesh, self.world.rank)
            if spec.split == "rows":
                batch, args = args[0], args[1:]
                parts = split_rows(batch, len(self.layout.on(spec.mesh)))
                if share is not None:
                    args = (batch.take(parts[share.index]), *args)
            elif args and isinstance(args[0], Batch):
                digest = zlib.crc32(args[0].to_ipc())
            answer = None if share is None else getattr(worker, verb)(*args, **kwargs)
            if spec.collect == "shards":
                return self._shards(spec, answer)
            if spec.collect == "batches" and answer is not None:
                answer = Batch.concat(answer)
        return self._collect(spec, verb, answer, share is not None, parts, digest)

    def _collect(self, spec: Verb, verb: str, answer: Any, is_member: bool, parts: list[list[int]], digest: int) -> Any:
        first = self.layout.answering(spec.mesh)
        sends = is_member and (spec.collect in ("rows", "batches") or self.world.rank == first)
        answers = self.world.exchange(f"{self.role}.{verb}", answer, sends=sends, digest=digest)
        if spec.collect in ("rows", "batches"):
            found = list(zip(parts, self.layout.on(spec.mesh), strict=True))
            if spec.collect == "batches":
                return iter([Batch.concat(answers[rank] for rows, rank in found if rows)] if any(parts) else [])
            for rows, rank in found:
                check_answer(f"{self.role}.{verb}", rank, len(rows), answers[rank])
            return join_rows([(rows, answers[rank]) for rows, rank in found])
        return None if spec.collect == "none" else answers[first]

    def _shards(self, spec: Verb, stream: Iterator[Shard] | None) -> Iterator[Shard]:
        """A stream that every rank draws from in step. Ranks outside of the role get it from the first one in it."""
        if len(self.layout.on(spec.mesh)) == self.world.size:
            assert stream is not None
            yield from stream
            return
        everyone = self.world.group(range(self.world.size))
        with self.world.collective(f"{self.role}, weights"):
            yield from broadcast_shards(stream, self.layout.answering(spec.mesh), everyone)
