"""Data parallelism: ranks with different rows, and the whole of each weight or rows of it.

`replicate` (DDP): every rank has the whole model; gradient sums are added over ranks once a step. So are those of ranks
that differ in the tokens they have of the same rows, or in their experts.
`shard` (FSDP2; Zhao et al. 2023, arXiv 2304.11277), with or without replicas: a rank keeps rows of each weight, of its
gradient sum and of its optimizer state. A layer's weights are gathered for its forward and backward and freed again;
its gradient is reduced to the ranks that keep its rows. A model in half precision keeps fp32 rows, which are the
masters, and computes on gathered copies in its own dtype.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from verl.training.forward import Forward
from verl.training.gradients import Gradients, Weight
from verl.training.options import FSDPConfig
from verl.training.parallel.result import Parallel
from verl.training.parallel.units import units
from verl.training.ranks import Ranks
from verl.weights.cuts import sharded_dims_of


def replicate(ranks: Ranks, parallel: Parallel, *dims: str) -> None:
    """Equal weights on ranks with other rows or tokens: gradients are added up over `dims`, but for those along which
    a weight is cut."""

    def summed(weight: Weight) -> tuple[str, ...]:
        cut = {cut.dim for cut in sharded_dims_of(weight.source)}
        return tuple(dim for dim in dims if dim not in cut)

    def reduce(gradients: Gradients) -> None:
        for over in sorted({summed(weight) for weight in gradients.weights}):
            weights = [weight for weight in gradients.weights if summed(weight) == over]
            gradients.sum_over_ranks(ranks.along(*over), weights)

    parallel.reductions.append(reduce)


def shard(forward: Forward, ranks: Ranks, parallel: Parallel, config: FSDPConfig, *, trains: bool) -> None:
    """Weights cut by rows: the model's parameters are DTensors from then on.

    Raises:
        ConfigError: weights of that dtype cannot be trained so, or a policy names no module.
    """
    packed = forward.packed
    dtype = packed.dtype
    half = trains and dtype in (torch.bfloat16, torch.float16)
    if half:
        forward.model.float()
    dims = ("replicate", "shard") if ranks.mesh.layout.replicate > 1 else ("shard",)
    precision = _precision(config, dtype if half else None)
    options: dict[str, Any] = {
        "mesh": ranks.device_mesh(packed.device, *dims),
        "reshard_after_forward": config.reshard_after_forward,
    }
    if config.param_offload:  # unpinned: pieces of gradients are there when a hook reads them
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    _cast_buffers(forward.model, config)
    wrapped = units(packed, config)
    for module in reversed(wrapped):  # inner ones first
        fully_shard(module, mp_policy=precision, **options)
    if config.forward_prefetch:
        for unit, following in pairwise(wrapped):
            cast(FSDPModule, unit).set_modules_to_forward_prefetch([cast(FSDPModule, following)])
    if forward.head != "lm":  # fp32, whatever the backbone is in
        fully_shard(forward.model.score, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **options)
    fully_shard(forward, mp_policy=precision, **options)
    for module in forward.modules():
        if isinstance(module, FSDPModule):
            # Losses are normalised over all ranks already: gradients add up.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    parallel.cut_dims += ("shard",)
    parallel.in_step = True


def _precision(config: FSDPConfig, half: torch.dtype | None) -> MixedPrecisionPolicy:
    """`half`: what the weights are in, where ranks keep fp32 pieces of them."""
    policy = config.mixed_precision
    gathered = half if policy.param_dtype is None else getattr(torch, policy.param_dtype)
    reduced = getattr(torch, policy.reduce_dtype or "float32") if policy.reduce_dtype or half else None
    return MixedPrecisionPolicy(gathered, reduced, cast_forward_inputs=False)


def _cast_buffers(model: nn.Module, config: FSDPConfig) -> None:
    if (name := config.mixed_precision.buffer_dtype) is not None:
        for module in model.modules():
            for key, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    module._buffers[key] = buffer.to(getattr(torch, name))
