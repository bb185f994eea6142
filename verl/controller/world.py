"""A world of ranks: torch.distributed set up, process groups of the roles, and small exchanges between all ranks."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import pickle
import time
import traceback
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from verl.controller.lifeline import Lifeline
from verl.controller.ranks import rank_here, torchrun_ranks, who
from verl.device import default_kind
from verl.errors import ClusterError
from verl.workers.place import ROLE, Place, Share

logger = logging.getLogger(__name__)

#: Seconds that ranks wait for each other when nobody says otherwise.
TIMEOUT = 1800.0
_FAILED = "verl/failed"


@dataclass(frozen=True)
class Layout:
    """The world ranks of one role, by mesh. `train` and `rollout` may be the same ranks, or apart."""

    role: str
    meshes: Mapping[str, tuple[int, ...]]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for ranks in self.meshes.values() for rank in ranks}))

    def on(self, mesh: str) -> tuple[int, ...]:
        return self.ranks if mesh == ROLE else self.meshes[mesh]

    def share(self, mesh: str, rank: int) -> Share | None:
        ranks = self.on(mesh)
        return Share(ranks.index(rank), len(ranks)) if rank in ranks else None

    def answering(self, mesh: str) -> int:
        """The world rank whose answer stands for all."""
        return self.on(mesh)[0]


class World:
    """All ranks of one torch.distributed job, seen from one of them."""

    def __init__(self, rank: int, size: int, init_method: str, timeout: float, device: str) -> None:
        self.rank, self.size, self.timeout, self.device = rank, size, timeout, device
        wait = timedelta(seconds=timeout)
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
            dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size, timeout=wait)
        # Control messages have a group of their own, so that they never meet the collectives of a verb.
        self.control = dist.new_group(backend="gloo", timeout=wait)
        self._groups: dict[tuple[int, ...], Any] = {}
        self.store: Any = dist.distributed_c10d._get_default_store()
        #: to rank 0, where the driver is replicated
        self.lifeline: Lifeline | None = None
        #: collectives that this rank is in, or that broke
        self._open: set[object] = set()

    def group(self, ranks: Sequence[int]) -> Any:
        """The process group of some ranks; all ranks of the world make it, in the same order."""
        key = tuple(ranks)
        if key not in self._groups:
            self._groups[key] = dist.new_group(list(key), timeout=timedelta(seconds=self.timeout))
        return self._groups[key]

    def place(self, layout: Layout) -> Place | None:
        """This rank's place in a role; None: it has none. Called by all ranks of the world in the same order."""
        groups = {mesh: self.group(ranks) for mesh, ranks in layout.meshes.items() if len(ranks) > 1}
        if len(layout.ranks) > 1:
            groups[ROLE] = self.group(layout.ranks)
        if self.rank not in layout.ranks:
            return None
        shares = {mesh: layout.share(mesh, self.rank) for mesh in (ROLE, *layout.meshes)}
        return Place(
            role=layout.role,
            rank=layout.ranks.index(self.rank),
            size=len(layout.ranks),
            device=self.device,
            trainer=layout.ranks.index(layout.answering("train")),
            shares={mesh: share for mesh, share in shares.items() if share is not None},
            groups=groups,
        )

    def exchange(self, tag: str, value: Any = None, *, sends: bool = True, digest: int = 0) -> list[Any]:
        """Every rank's value, at every rank; None from ranks that send nothing.

        Raises:
            ClusterError: the ranks are not at the same verb, hold other batches, one died, or the deadline passed.
        """
        payload = pickle.dumps(value) if sends else b""
        own = torch.tensor([len(payload), zlib.crc32(tag.encode()), digest], dtype=torch.int64)
        headers = [torch.empty_like(own) for _ in range(self.size)]
        with self.collective(tag):
            dist.all_gather(headers, own, group=self.control)
        table = torch.stack(headers)
        self._compare(tag, table)
        values: list[Any] = []
        for source, nbytes in enumerate(table[:, 0].tolist()):
            if not nbytes:
                values.append(None)
                continue
            data = bytearray(payload) if source == self.rank else bytearray(nbytes)
            with self.collective(tag):
                dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), source, group=self.control)
            values.append(pickle.loads(data))
        return values

    def anywhere(self, about: str, flag: bool) -> bool:
        """Whether `flag` is set on any rank; asked on all."""
        return any(self.exchange(about, flag))

    async def told(self, key: str, what: str) -> bytes:
        """What rank 0 of a torchrun job puts under `key` into the store, once it is there.

        Raises:
            ClusterError: rank 0 died, or the deadline passed.
        """
        assert self.lifeline is not None
        until = time.monotonic() + self.timeout
        with self.collective(what):
            while not self.store.check([key]):
                if self.lifeline.is_broken or time.monotonic() > until:
                    raise dist.DistError("rank 0 did not come to it")
                await asyncio.sleep(0.005)
            value: bytes = self.store.get(key)
        return value

    def _compare(self, tag: str, table: torch.Tensor) -> None:
        for column, what in ((1, "run another verb"), (2, "hold another batch")):
            if bool((table[:, column] != table[0, column]).any()):
                others = [rank for rank in range(self.size) if table[rank, column] != table[self.rank, column]]
                raise ClusterError(
                    f"ranks {others} {what} than rank {self.rank}, which is at '{tag}': the script must do the same on "
                    "every rank; whatever is random or reads the clock belongs into a reward or a node"
                )

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Inside, a broken collective raises `ClusterError` with the failed rank's own words, if it had any; what goes
        wrong on this rank is told to the others, before it ends."""
        self._open.add(at := object())
        try:
            yield
            self._open.remove(at)
        except Exception as error:
            if is_broken_collective(error):
                raise ClusterError(f"{who()}, waited in '{what}': {self._reason(error)}") from error
            text = "".join(traceback.format_exception(error))
            self.store.set(_FAILED, f"{who()}:\n{text}")
            raise

    def leave(self) -> None:
        """For the end of the process: let the threads of the collectives end, unless they may be waiting for others.

        Such a thread may be the last to hold a tensor, and if it drops that while the interpreter goes down, the
        process aborts."""
        if not self._open and dist.is_initialized():
            dist.destroy_process_group()

    def _reason(self, error: Exception) -> str:
        try:
            if self.store.check([_FAILED]):
                return f"another rank failed: {self.store.get(_FAILED).decode()}"
        except RuntimeError as gone:  # the process that kept the store is the one that died
            logger.debug("the store of the job is gone: %s", gone)
        return f"another rank died, or was silent for {self.timeout:g} s ({error})"


def is_broken_collective(error: BaseException) -> bool:
    """Whether torch.distributed raised it because another rank is gone or late. Gloo has no class for that."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error).lower())


_worlds: list[World] = []


def has_joined() -> bool:
    """Whether this process is a rank of the torchrun job already."""
    return bool(_worlds)


def here(timeout: float = TIMEOUT, device: str | None = None) -> World:
    """This rank's side of the torchrun job: one a process, joined at the first use, as it is asked for then.

    Args:
        device: "cpu" or "cuda"; None: the accelerator where there is one.
    """
    if not _worlds:
        kind = device or default_kind()
        own = f"cuda:{os.environ.get('LOCAL_RANK', rank_here())}" if kind == "cuda" else "cpu"
        world = World(rank_here(), torchrun_ranks(), "env://", timeout, own)
        world.lifeline = Lifeline(world.store, timeout)
        atexit.register(world.leave)
        _worlds.append(world)
    return _worlds[0]
