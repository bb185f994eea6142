"""One rank on a Ray cluster: an actor around a `RankWorker`."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import ray
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from verl._host.ranks import registry, who
from verl.cluster.rank_worker import stacks
from verl.cluster.world import World
from verl.errors import ClusterError
from verl.weights.shard import Shard, in_buckets

logger = logging.getLogger(__name__)
#: Seconds for a bunch of shards to come over from the object store of another node.
_FETCH = 120.0


class WorkerError(Exception):
    """A worker's exception on its way to the driver: its `args` are the exception itself, and its traceback with role,
    rank and host, which an exception does not take along."""


class RayRank:
    """The methods that the driver calls; one at a time and in the order they were called in, except for `watch`."""

    #: Where all ranks meet, at the rank that has opened it.
    _store: Any = None

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
        self.worker = World(rank, len(machines), store, timeout, device)

    def carry_out(self, *command: Any) -> list[Any]:
        """Run a command; its results, which come with the answer to the call: a stream costs two more messages."""
        return [item for items in self.stream(*command) for item in items]

    @ray.method(num_returns="streaming")  # type: ignore[untyped-decorator]
    def stream(
        self, name: str, args: Any, answers: bool, rows: Sequence[int] | None, first: Any
    ) -> Iterator[list[Any]]:
        """Run a command; yields lists of its results: buckets of shards, anything else one by one.

        Args:
            args: pickled, if they are small.
            first: a batch, or of a stream references to lists of its items.
        """
        args = pickle.loads(args) if isinstance(args, bytes) else args
        if not hasattr(World, name):  # before there is one
            yield [getattr(self, name)(*args)]
            return
        if isinstance(first, list):
            first = chain.from_iterable(ray.get(bunch, timeout=_FETCH) for bunch in first)
        try:
            items = self.worker.carry_out(name, args, answers, rows, first)
            for first in items:
                if isinstance(first, Shard):
                    yield from in_buckets(chain([first], items))
                else:
                    yield [first]
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            raise WorkerError(
                _portable(error), f"{who()}, {args[1] if name in ('call', 'stream') else name}:\n{text}"
            ) from None

    @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator]
    def watch(self, *command: Any) -> list[str]:
        """The stack of every thread, while another method runs."""
        return [stacks()]


def _portable(error: Exception) -> Exception:
    """The error, or its text if it cannot be pickled."""
    try:
        pickle.loads(ray.cloudpickle.dumps(error))
    except Exception:  # whatever a class of the user's own raises when it is made anew
        return ClusterError(f"{who()}: {type(error).__name__}: {error}")
    return error
