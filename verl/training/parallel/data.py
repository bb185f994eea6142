"""Data parallelism: ranks with different rows, and the whole of each weight or rows of it.

`replicate` (DDP): every rank has the whole model; gradient sums are added over ranks once a step. So are those of ranks
that differ in the tokens they have of the same rows, or in their experts.
`shard` (FSDP2; Zhao et al. 2023, arXiv 2304.11277), with or without replicas: a rank keeps rows of each weight, of its
gradient sum and of its optimizer state. A layer's weights are gathered for its forward and backward and freed again;
its gradient is reduced to the ranks that keep its rows. A model in half precision keeps fp32 rows, which are the
masters, and computes on gathered copies in its own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from verl.models.cuts import cuts_of
from verl.training.forward import Forward
from verl.training.gradients import Gradients, Weight
from verl.training.parallel.result import Parallel
from verl.training.ranks import Ranks


def replicate(ranks: Ranks, parallel: Parallel, *dims: str) -> None:
    """Equal weights on ranks with other rows or tokens: gradients are added up over `dims`, but for those along which
    a weight is cut."""

    def summed(weight: Weight) -> tuple[str, ...]:
        cut = {dim for dim, _ in cuts_of(weight.source)}
        return tuple(dim for dim in dims if dim not in cut)

    def reduce(gradients: Gradients) -> None:
        for own in sorted({summed(weight) for weight in gradients.weights}):
            weights = [weight for weight in gradients.weights if summed(weight) == own]

            def all_reduce(tensors: Sequence[Tensor], op: Any, own: tuple[str, ...] = own) -> None:
                ranks.all_reduce(tensors, op, *own)

            gradients.sum_over_ranks(all_reduce, weights)

    parallel.reductions.append(reduce)


def shard(forward: Forward, ranks: Ranks, parallel: Parallel, *, trains: bool) -> None:
    """Weights cut by rows: the model's parameters are DTensors from then on."""
    packed = forward.packed
    dtype = packed.dtype
    half = trains and dtype in (torch.bfloat16, torch.float16)
    if half:
        forward.model.float()
    dims = ("replicate", "shard") if ranks.mesh.layout.replicate > 1 else ("shard",)
    plain = MixedPrecisionPolicy(cast_forward_inputs=False)
    mixed = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": ranks.device_mesh(packed.device, *dims), "reshard_after_forward": True}
    stacks = [module for module in packed.backbone.modules() if isinstance(module, nn.ModuleList)]
    layers = next((stack for stack in stacks if len(stack) == packed.num_layers), ())
    for module in layers:
        fully_shard(module, mp_policy=mixed if half else plain, **options)
    if forward.head != "lm":  # fp32, whatever the backbone is in
        fully_shard(forward.model.score, mp_policy=plain, **options)
    fully_shard(forward, mp_policy=mixed if half else plain, **options)
    for module in forward.modules():
        if isinstance(module, FSDPModule):
            # Losses are normalised over all ranks already: gradients add up.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    parallel.cut_dims += ("shard",)
    parallel.in_step = True
