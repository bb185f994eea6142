"""Expert parallelism: ranks with different rows, each with some of the experts of every mixture-of-experts block.

A rank routes its own tokens. An all-to-all sends them to the ranks of their experts, another returns the results, which
are weighted here. So an expert's gradient already covers the tokens of all ranks along `ep`; gradients of all other
weights, routers included, are summed over `ep` after the last backward pass of a step.

Shapes: T tokens of this rank, K experts a token, D hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from verl._base.autograd import exchange
from verl.errors import ConfigError
from verl.training.forward import Forward
from verl.training.ranks import Parallel, Ranks
from verl.weights.shard import local_weights


def fused_experts(forward: Forward, size: int) -> list[Any]:
    """The modules whose experts `size` ranks can share.

    Raises:
        ConfigError: the model has no experts that can be cut, or a number that `size` does not divide.
    """
    name = type(forward.packed.model).__name__
    blocks: list[Any] = [module for module in forward.model.modules() if _has_fused_experts(module)]
    if not blocks:
        raise ConfigError(
            f"layout: ep={size} cuts the experts of a model, and {name} has none in weights [experts, ...]: use ep=1"
        )
    if odd := [block.num_experts for block in blocks if block.num_experts % size]:
        raise ConfigError(f"layout: ep={size} does not divide the {odd[0]} experts of {name}")
    return blocks


def expert(forward: Forward, ranks: Ranks, parallel: Parallel) -> None:
    """Cut the experts of a model over `ep`: their weights are DTensors from then on, cut along the first dimension."""
    size = ranks.mesh.layout.ep
    mesh = ranks.device_mesh(forward.packed.device, "ep")
    for block in fused_experts(forward, size):
        for weight, parameter in [*block.named_parameters(recurse=False)]:
            cut = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            block.register_parameter(weight, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        block.num_experts //= size
        # Around the block's own forward, not in place of the block: weights keep their names, readers its attributes.
        block.forward = partial(_dispatch, block=block, forward=block.forward, group=ranks.group("ep"))
    parallel.cut_dims += ("ep",)
    parallel.lockstep = True


def _has_fused_experts(module: nn.Module) -> bool:
    """Whether a module computes all experts of a block from hidden states and their routing."""
    weights = [*module.parameters(recurse=False)]
    count = getattr(module, "num_experts", None)
    arguments = list(inspect.signature(module.forward).parameters)
    takes_routing = arguments == ["hidden_states", "top_k_index", "top_k_weights"]
    return bool(weights) and takes_routing and all(weight.shape[0] == count for weight in weights)


def _dispatch(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    block: Any,
    forward: Callable[..., Tensor],
    group: Any,
) -> Tensor:
    """The forward of a module of experts of which this rank has some, whose computation is `forward`: `[T, D]`, of
    tokens `[T, D]` routed to experts `[T, K]` with weights `[T, K]`."""
    local, chosen, size = block.num_experts, top_k_index.shape[1], dist.get_world_size(group)
    experts = top_k_index.flatten()
    order = experts.argsort(stable=True)  # by expert, so by rank
    counts = experts.bincount(minlength=size * local).view(size, local)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    to, of = counts.sum(1).tolist(), received.sum(1).tolist()
    tokens = exchange(hidden_states[order // chosen], group, to, of)
    index = torch.arange(local, device=order.device).repeat(size).repeat_interleave(received.flatten())
    # Where no token has come, one of zeros is computed and left out, so that the backward pass has the same collectives
    # and weights on all ranks.
    count = len(tokens)
    if not count:
        tokens, index = tokens.sum(0, keepdim=True), index.new_zeros(1)
    with local_weights(block):
        results = forward(tokens, index[:, None], torch.ones_like(tokens[:, :1]))[:count]
    results = exchange(results, group, of, to)
    by_token_TKD = results[order.argsort()].unflatten(0, (-1, chosen))
    weighted_TKD: Tensor = by_token_TKD * top_k_weights[..., None]
    return weighted_TKD.sum(1).to(hidden_states.dtype)
