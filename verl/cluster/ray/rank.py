"""One rank on a Ray cluster: an actor around a `RankWorker`."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import ray
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from verl._host.ranks import registry, who
from verl.batch import Batch
from verl.cluster.rank_context import RoleMeshes
from verl.cluster.rank_worker import RankWorker, stacks
from verl.cluster.world import World
from verl.errors import ClusterError
from verl.weights.shard import Shard, in_buckets

logger = logging.getLogger(__name__)
#: Seconds for a bunch of shards to come over from the object store of another node.
_FETCH = 120.0


class WorkerError(Exception):
    """A worker's exception on its way to the driver: `error` itself, and its traceback with role, rank and host, which
    an exception does not take along."""

    def __init__(self, error: Exception, trace: str) -> None:
        super().__init__(error, trace)
        self.error, self.trace = error, trace


@dataclass(frozen=True)
class Stream:
    """A stream of shards on its way to a worker: references to bunches of them."""

    bunches: Sequence[Any]

    def open(self) -> Iterator[Shard]:
        for reference in self.bunches:
            yield from ray.get(reference, timeout=_FETCH)


class RayRank:
    """The methods that the driver calls; one at a time and in the order they were called in, except for `stacks`."""

    def __init__(self) -> None:
        self._store: Any = None

    def about(self) -> dict[str, Any]:
        """Where the rank is."""
        host = {"address": ray.util.get_node_ip_address(), "host": socket.gethostname()}
        return {**host, "pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}

    def open_store(self, is_one_machine: bool) -> int:
        """Open the store at which all ranks meet; its port. torch gets a bound socket, which listens on the loopback
        interface alone where all ranks are on one machine."""
        address = "127.0.0.1" if is_one_machine else ray.util.get_node_ip_address()
        bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        bound.bind((address, 0))
        port = int(bound.getsockname()[1])
        self._store = TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=bound.detach(),
            timeout=timedelta(seconds=60),
        )  # fmt: skip
        return port

    def join(
        self,
        rank: int,
        machines: Sequence[str],
        meeting: tuple[str, int],
        timeout: float,
        device: str,
        threads: int,
        path: list[str],
    ) -> None:
        """Become a rank of the world, whose ranks run on `machines` and meet at an address; import from where the
        driver does."""
        sys.path += [folder for folder in path if folder not in sys.path]
        # To code that asks, such as log messages, this process is what torchrun would have made it.
        here = [index for index, machine in enumerate(machines) if machine == machines[rank]]
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(machines)), "LOCAL_WORLD_SIZE": str(len(here))}
        registry.is_closed = True
        torch.set_num_threads(threads)
        store = self._store or TCPStore(*meeting, is_master=False, timeout=timedelta(seconds=timeout))
        self.worker = RankWorker(World(rank, len(machines), store, timeout, device))

    def make(self, key: int, recipe: partial[Any], role: RoleMeshes) -> None:
        with self._reported(role.role):
            self.worker.make(key, recipe, role)

    def call(self, pickled: bytes, *first: Batch | Stream) -> Any:
        """The result of a call; None from a rank that does not answer.

        Args:
            pickled: arguments of `RankWorker.execute`; this rank's rows of the batch that comes along (None: all of
                it); and whether it answers.
            first: the call's first argument, if it is a batch or a stream, which travel separately from the others.
        """
        return next(self._items(pickled, *first), None)

    @ray.method(num_returns="streaming")  # type: ignore[untyped-decorator]
    def stream(self, pickled: bytes, *first: Batch | Stream) -> Iterator[Any]:
        """Items of a call, shards in bunches; none from a rank that does not answer. Arguments: see `call`."""
        items = self._items(pickled, *first)
        item = next(items, None)
        if isinstance(item, Shard):
            yield from in_buckets(chain([item], items))
        elif item is not None:
            yield item
            yield from items

    def _items(self, pickled: bytes, *first: Batch | Stream) -> Iterator[Any]:
        (key, method, args, kwargs), rows, answers = pickle.loads(pickled)
        with self._reported(method):
            here = (one.open() if isinstance(one, Stream) else one if rows is None else one.take(rows) for one in first)
            for item in self.worker.execute(key, method, (*here, *args), kwargs):
                if answers:
                    yield item

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """A function in this process."""
        with self._reported("run"):
            return self.worker.run(function, args)

    @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator]
    def stacks(self) -> str:
        """The stack of every thread, while another method runs."""
        return stacks()

    @contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            raise WorkerError(_portable(error), f"{who()}, {what}:\n{text}") from None


def _portable(error: Exception) -> Exception:
    """The error, or its text if it cannot be pickled."""
    try:
        pickle.loads(ray.cloudpickle.dumps(error))
    except Exception:  # whatever a class of the user's own raises when it is made anew
        return ClusterError(f"{who()}: {type(error).__name__}: {error}")
    return error
