"""One slot of a Ray cluster: a process with the workers of all roles that stand there, and its rank of the world."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray

from verl.batch import Batch
from verl.controller.group import noted
from verl.controller.once import portable
from verl.controller.ranks import who
from verl.controller.world import Layout, World
from verl.shard import Shard
from verl.workers.place import verb_of

logger = logging.getLogger(__name__)

#: Bytes of shards that travel as one object.
_BUNCH = 64 << 20


class WorkerError(Exception):
    """A worker's exception on its way to the driver: `error` itself, and `told`, its traceback with role, rank and
    host, which an exception does not take along."""

    def __init__(self, error: Exception, told: str) -> None:
        super().__init__(error, told)
        self.error, self.told = error, told


@dataclass(frozen=True)
class Stream:
    """A stream of shards that is on its way to a worker: references to bunches of them."""

    bunches: Sequence[Any]

    def open(self) -> Iterator[Shard]:
        for reference in self.bunches:
            yield from ray.get(reference)


@dataclass(frozen=True)
class Order:
    """What a rank shall do. It travels pickled, since Ray takes much longer over arguments one by one.

    Attributes:
        role: the key of the role's workers.
        args: the verb's arguments but the first, where that is a batch or a stream, which come beside the order.
        answers: whether what the verb gives counts.
        batch: key of the batch that is the first argument; None: there is none.
        rows: those of the batch that are this rank's; None: all.
        new: keys of the batches that come along, each with that of the batch that it adds columns to, or None.
        kept: keys of the batches that later orders may name.
    """

    role: int
    verb: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answers: bool
    batch: int | None = None
    rows: list[int] | None = None
    new: Sequence[tuple[int, int | None]] = ()
    kept: Sequence[int] = ()


class SlotWorker:
    """The methods that the driver calls; one at a time and in the order they were called in, except for `stacks`."""

    def __init__(self) -> None:
        self._workers: dict[int, tuple[str, Any]] = {}
        self._batches: dict[int, Batch] = {}

    def about(self) -> dict[str, Any]:
        """Where the slot is, with a port that is free there."""
        with socket.socket() as found:
            found.bind(("", 0))
            port = found.getsockname()[1]
        host = {"address": ray.util.get_node_ip_address(), "host": socket.gethostname(), "port": port}
        return {**host, "pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}

    def join(
        self, rank: int, ranks: Sequence[str], meeting: str, timeout: float, device: str, threads: int, path: list[str]
    ) -> None:
        """Become a rank of the world, whose ranks stand on the machines `ranks` and meet at an address; import from
        where the driver does."""
        import torch

        sys.path += [folder for folder in path if folder not in sys.path]
        # To code that asks, such as log messages, this process is what torchrun would have made it.
        here = [index for index, machine in enumerate(ranks) if machine == ranks[rank]]
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(ranks)), "LOCAL_WORLD_SIZE": str(len(here))}
        torch.set_num_threads(threads)
        self.world = World(rank, len(ranks), meeting, timeout, device)

    def make(self, key: int, recipe: partial[Any], layout: Layout) -> None:
        """This rank's worker of a role, if it has one. All slots are asked, in the same order."""
        with self._told(layout.role, "start"):
            place = self.world.place(layout)
            if place is not None:
                self._workers[key] = (layout.role, recipe(place=place))
                logger.info("process %d: rank %d of %d of role '%s'", os.getpid(), place.rank, place.size, place.role)

    def call(self, pickled: bytes, *beside: Any) -> Any:
        """What a verb returns; None from a rank whose answer does not count."""
        order: Order = pickle.loads(pickled)
        role, worker = self._workers[order.role]
        with self._told(role, order.verb):
            answer = getattr(worker, order.verb)(*self._arguments(order, beside), **order.kwargs)
            return answer if order.answers else None

    @ray.method(num_returns="streaming")  # type: ignore[untyped-decorator]
    def stream(self, pickled: bytes, *beside: Any) -> Iterator[Any]:
        """What a verb yields, shards in bunches; nothing from a rank whose answer does not count."""
        order: Order = pickle.loads(pickled)
        role, worker = self._workers[order.role]
        with self._told(role, order.verb):
            items = getattr(worker, order.verb)(*self._arguments(order, beside), **order.kwargs)
            for item in bunched(items) if verb_of(type(worker), order.verb).collect == "shards" else items:
                if order.answers:
                    yield item

    def _arguments(self, order: Order, beside: Sequence[Any]) -> list[Any]:
        if order.batch is None:
            return [*(stream.open() for stream in beside), *order.args]
        for (key, base), part in zip(order.new, beside, strict=True):
            self._batches[key] = part if base is None else self._batches[base].add(part)
        self._batches = {key: batch for key, batch in self._batches.items() if key in order.kept}
        batch = self._batches[order.batch]
        return [batch if order.rows is None else batch.take(order.rows), *order.args]

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """A function in this process."""
        return function(*args)

    @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator]
    def stacks(self) -> str:
        """Where every thread stands, told while another method runs."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames().items()
        return "\n".join(f"{names.get(i, i)}:\n{''.join(traceback.format_stack(frame))}" for i, frame in frames)

    @contextmanager
    def _told(self, role: str, verb: str) -> Iterator[None]:
        try:
            with self.world.collective(f"{role}.{verb}"), noted(f"in role '{role}', {who()}, verb '{verb}'"):
                yield
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            raise WorkerError(portable(error, ray.cloudpickle), f"{who()}, role '{role}':\n{text}") from None


def bunched(shards: Iterable[Shard]) -> Iterator[list[Shard]]:
    """Shards on the CPU, in lists of about `_BUNCH` bytes."""
    bunch: list[Shard] = []
    for shard in shards:
        bunch.append(replace(shard, tensor=shard.tensor.detach().cpu()))
        if sum(held.nbytes for held in bunch) >= _BUNCH:
            yield bunch
            bunch = []
    if bunch:
        yield bunch
