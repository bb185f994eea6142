"""Expert parallelism: ranks with different rows, each with some of the experts of every mixture-of-experts block.

A rank routes its own tokens. An all-to-all sends them to the ranks of their experts, another returns the results, which
are weighted here. So an expert's gradient already covers the tokens of all ranks along `ep`; gradients of all other
weights, routers included, are summed over `ep` after the last backward pass of a step.

Shapes: T tokens of this rank, K experts a token, D hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
        block.forward = _Dispatch(block, ranks.group("ep"), size)
    parallel.cut_dims += ("ep",)
    parallel.lockstep = True


def _has_fused_experts(module: nn.Module) -> bool:
    """Whether a module computes all experts of a block from hidden states and their routing."""
    weights = [*module.parameters(recurse=False)]
    count = getattr(module, "num_experts", None)
    arguments = list(inspect.signature(module.forward).parameters)
    return bool(weights) and arguments == _ARGUMENTS and all(weight.shape[0] == count for weight in weights)


_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]


class _Dispatch:
    """The forward of a module of experts of which this rank has some."""

    def __init__(self, block: Any, group: Any, size: int) -> None:
        self._block, self._group, self._size = block, group, size
        self._forward: Callable[..., Tensor] = block.forward

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[T, D]`, of tokens `[T, D]` routed to experts `[T, K]` with weights `[T, K]`."""
        local, chosen = self._block.num_experts, top_k_index.shape[1]
        experts = top_k_index.flatten()
        order = experts.argsort(stable=True)  # by expert, so by rank
        counts = experts.bincount(minlength=self._size * local).view(self._size, local)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self._group)
        to, of = counts.sum(1).tolist(), received.sum(1).tolist()
        tokens = exchange(hidden_states[order // chosen], self._group, to, of)
        index = torch.arange(local, device=order.device).repeat(self._size).repeat_interleave(received.flatten())
        results = exchange(self._own(tokens, index), self._group, of, to)
        by_token_TKD = results[order.argsort()].unflatten(0, (-1, chosen))
        weighted_TKD: Tensor = by_token_TKD * top_k_weights[..., None]
        return weighted_TKD.sum(1).to(hidden_states.dtype)

    def _own(self, tokens: Tensor, index: Tensor) -> Tensor:
        """Results of this rank's experts. Where no token has come, one of zeros is computed and left out, so that the
        backward pass has the same collectives and weights on all ranks."""
        if not len(tokens):
            return self._own(tokens.sum(0, keepdim=True), index.new_zeros(1))[:0]
        with local_weights(self._block):
            return self._forward(tokens, index[:, None], torch.ones_like(tokens[:, :1]))
