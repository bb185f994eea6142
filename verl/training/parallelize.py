"""How the ranks of a mesh share a model: one function a dimension (`verl.training.parallel`), composed in one order."""

from __future__ import annotations

from torch import nn

from verl.layout import ModelShape
from verl.models.cuts import local_part
from verl.training.forward import Forward
from verl.training.options import FSDPConfig
from verl.training.parallel.data import replicate, shard
from verl.training.parallel.expert import expert
from verl.training.parallel.pipeline import pipeline
from verl.training.parallel.result import Parallel
from verl.training.parallel.sequence import sequence
from verl.training.parallel.tensor import tensor
from verl.training.ranks import Ranks


def parallelize(forward: Forward, ranks: Ranks, config: FSDPConfig, *, trains: bool) -> Parallel:
    """Lay a model, whole and equal on all ranks, out over a mesh, in place.

    Raises:
        ConfigError: the model cannot be cut so.
    """
    layout = ranks.mesh.layout
    layout.check(ModelShape.of(forward.packed.config))
    parallel = Parallel(ranks.mesh)
    if layout.pp > 1:
        pipeline(forward, ranks, parallel, trains=trains)
    parallel.dtypes = {name: weight.dtype for name, weight in forward.model.named_parameters()}
    if layout.tp > 1:
        tensor(forward, ranks, parallel)
    if layout.ep > 1:
        expert(forward, ranks, parallel)
    if layout.sp > 1:
        sequence(forward, ranks)
    if layout.shard > 1:
        shard(forward, ranks, parallel, config, trains=trains)
    over = ("sp", "ep") if layout.shard > 1 else ("replicate", "sp", "ep")  # FSDP adds up over replicas itself
    if summed := [dim for dim in over if getattr(layout, dim) > 1]:
        replicate(ranks, parallel, *summed)
    return parallel


def piece(weight: nn.Parameter) -> nn.Parameter:
    """What of a weight this rank keeps: the weight itself where it is not cut, else its part on the same memory."""
    local = local_part(weight)
    return weight if local is weight else nn.Parameter(local.detach(), requires_grad=weight.requires_grad)
