"""torch's device mesh by the names of dimensions, over the ranks of the job."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as make_mesh

from verl._host import device
from verl._host.ranks import torchrun_ranks
from verl.cluster.world import stay_on_loopback
from verl.errors import ConfigError


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
    kind = device_type or device.default_kind()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        if ranks > 1:
            stay_on_loopback(ranks)
            dist.init_process_group(backend)
        else:
            # A store in memory: one process needs no rendezvous and opens no port.
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return make_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
