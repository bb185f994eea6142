"""A job of torch.distributed as one of its ranks sees it: its process groups, and a device mesh over its ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as make_mesh

from verl._host.device import default_kind
from verl._host.ranks import torchrun_ranks, who
from verl.cluster.rank_context import ROLE, WEIGHTS, RankContext, RoleMeshes
from verl.cluster.rank_worker import RankWorker
from verl.errors import BrokenCollectiveError, ConfigError


class World(RankWorker):
    """One rank of a torch.distributed job.

    Args:
        store: which the ranks share; None: they `meet`.
        timeout: seconds for any collective.
    """

    def __init__(self, rank: int, size: int, store: Any, timeout: float, device: str) -> None:
        super().__init__(device)
        self.rank, self.size, self.timeout, self._wait = rank, size, timeout, timedelta(seconds=timeout)
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            from verl.cluster.torchrun.meeting import joining, meet

            store = meet(rank, size, timeout) if store is None else store
            with joining(store, rank, size, "the process group"):
                init_process_group(device, size, rank=rank, world_size=size, timeout=self._wait, store=store)
        self._groups: dict[tuple[int, ...], Any] = {}
        #: Collectives that this rank is in, or that broke.
        self._open: set[object] = set()

    def group(self, ranks: Sequence[int]) -> Any:
        """The process group of some ranks; all ranks of the world make it, in the same order."""
        key = tuple(ranks)
        if key not in self._groups:
            self._groups[key] = dist.new_group(list(key), timeout=self._wait)
        return self._groups[key]

    def context(self, role: RoleMeshes) -> RankContext | None:
        ranks = role.ranks
        groups = {name: self.group(mesh.ranks) for name, mesh in role.meshes.items() if mesh.size > 1}
        if len(ranks) > 1:
            groups[ROLE] = self.group(ranks)
        # Weights may move in the background: in a group of their own they cannot mix with the role's collectives.
        if role.has_transition:
            groups[WEIGHTS] = dist.new_group(list(ranks), timeout=self._wait)
        parts = {part: self.group(part) for mesh in role.meshes.values() for part in mesh.parts()}
        if self.rank not in ranks:
            return None
        meshes = {name: role.mesh(name) for name in (ROLE, *role.meshes)}
        return RankContext(
            role=role.role,
            rank=ranks.index(self.rank),
            size=len(ranks),
            device=self.device,
            trainer=ranks.index(role.mesh("train").answering()[0]),
            meshes={name: mesh for name, mesh in meshes.items() if self.rank in mesh.ranks},
            groups=groups,
            parts={part: group for part, group in parts.items() if self.rank in part},
        )

    @contextmanager
    def collective(self, what: str, where: str) -> Iterator[None]:
        self._open.add(token := object())
        is_broken = False
        try:
            with super().collective(what, where):
                yield
        except Exception as error:
            if is_broken := is_broken_collective(error):
                raise BrokenCollectiveError(
                    f"{who()}, waited in '{what}': another rank died, or was silent for {self.timeout:g} s ({error})"
                ) from error
            raise
        finally:
            if not is_broken:
                self._open.discard(token)

    def leave(self) -> None:
        """End the threads of the collectives before the process exits, unless they may be waiting for other ranks.

        Such a thread may hold the last reference to a tensor, and the process aborts if that is dropped while the
        interpreter shuts down."""
        if not self._open and dist.is_initialized():
            dist.destroy_process_group()


def is_broken_collective(error: BaseException) -> bool:
    """Whether an error, or its cause, comes from torch.distributed because another rank is gone or late. Gloo raises a
    plain `RuntimeError` for that."""
    if isinstance(error, dist.DistError | BrokenCollectiveError):
        return True
    if type(error) is RuntimeError and "gloo" in str(error).lower():
        return True
    return error.__cause__ is not None and is_broken_collective(error.__cause__)


def init_process_group(device: str, ranks: int, **options: Any) -> None:
    """Torch's, whose gloo listens on the loopback interface only if all ranks are on this machine."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == ranks and os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo", **options)


def init_device_mesh(
    device_type: str | None = None,
    mesh_shape: Sequence[int] | None = None,
    *,
    dim_names: Sequence[str] | None = None,
    mesh_dim_names: Sequence[str] | None = None,
    **sizes: int,
) -> DeviceMesh:
    """A mesh over all ranks: `init_device_mesh(dp=2, sp=2)`, or by shape and `dim_names=("dp", "sp")`.

    All ranks of a torchrun job call it; a process alone is a job of one rank.

    Args:
        device_type: None: the accelerator where there is one.
        mesh_shape: ranks along each dimension, the first outermost; one may be -1: what the others leave.
        dim_names: the names of the dimensions; `mesh_dim_names`, as torch calls it, is the same.
        **sizes: the same, one keyword a dimension.

    Raises:
        ConfigError: the sizes do not multiply to the ranks, or are named more or less than once.
    """
    names = tuple(dim_names or mesh_dim_names or ())
    if mesh_shape is not None:
        if sizes or len(names) != len(mesh_shape):
            raise ConfigError(f"init_device_mesh: give {len(mesh_shape)} dim_names, or sizes by keyword, such as dp=2")
        sizes = dict(zip(names, map(int, mesh_shape), strict=True))
    ranks = torchrun_ranks()
    rest = ranks // max(1, abs(math.prod(sizes.values())))
    sizes = {name: rest if size == -1 else size for name, size in (sizes or {"dp": ranks}).items()}
    if math.prod(sizes.values()) != ranks or min(sizes.values()) < 1:
        shape = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigError(f"init_device_mesh: {shape} are not the {ranks} rank{'s' * (ranks > 1)} of this job")
    kind = device_type or default_kind()
    if not dist.is_initialized():
        # A store in memory: one process needs no rendezvous and opens no port.
        alone = {} if ranks > 1 else {"store": HashStore(), "rank": 0, "world_size": 1}
        init_process_group(kind, ranks, **alone)
    return make_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
