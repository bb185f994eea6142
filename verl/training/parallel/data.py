"""Data parallelism: ranks with different rows, and the whole of each weight or rows of it.

`replicate` (DDP): every rank has the whole model; gradient sums are added over ranks once a step. It also serves ranks
that hold different tokens of the same rows, or different experts.
`shard` (FSDP2; Zhao et al. 2023, arXiv 2304.11277), with or without replicas: a rank keeps rows of each weight, of its
gradient sum and of its optimizer state. A layer's weights are gathered for its forward and backward and freed again;
its gradient is reduced to the ranks that keep its rows. A model in half precision keeps fp32 rows, which are the
masters, and computes on gathered copies in its own dtype.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from verl._base.names import check_known
from verl._host.user_functions import load_function
from verl.errors import ConfigError
from verl.models.packed import PackedModel
from verl.training.forward import Forward
from verl.training.options import FSDPConfig
from verl.training.ranks import Parallel, Ranks
from verl.weights.shard import sharded_dims_of
from verl.weights.shards import stacks_of


def replicate(ranks: Ranks, parallel: Parallel, *dims: str) -> None:
    """Equal weights on ranks with other rows or tokens: gradients are added up over `dims`, but for those along which
    a weight is cut."""
    parallel.sum_over(
        ranks,
        lambda weight: tuple(dim for dim in dims if dim not in {cut.dim for cut in sharded_dims_of(weight.source)}),
    )


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
    if config.mixed_precision.buffer_dtype is not None:
        _cast_buffers(forward.model, getattr(torch, config.mixed_precision.buffer_dtype))
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
    parallel.lockstep = True


def _precision(config: FSDPConfig, half: torch.dtype | None) -> MixedPrecisionPolicy:
    """`half`: what the weights are in, where ranks keep fp32 pieces of them."""
    policy = config.mixed_precision
    gathered = half if policy.param_dtype is None else getattr(torch, policy.param_dtype)
    reduced = getattr(torch, policy.reduce_dtype or "float32") if policy.reduce_dtype or half else None
    return MixedPrecisionPolicy(gathered, reduced, cast_forward_inputs=False)


def _cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                module._buffers[key] = buffer.to(dtype)


def units(packed: PackedModel, config: FSDPConfig) -> list[nn.Module]:
    """The modules that FSDP shards and gathers as a unit, in model order: its layers, or the ones a policy names.

    Everything else belongs to the root unit, also embedding and head: they may be one tensor.

    Raises:
        ConfigError: the policy names no module of the model.
    """
    backbone, embedding = packed.backbone, packed.model.get_input_embeddings()
    inner = [module for module in backbone.modules() if module not in (backbone, embedding)]
    names, policy = config.wrap_policy.transformer_layer_cls_to_wrap, config.wrap_policy_fn
    if names is not None:
        what = f"wrap_policy.transformer_layer_cls_to_wrap: no module of this {type(backbone).__name__} is a"
        check_known(what, names, {type(module).__name__ for module in inner})
        return [module for module in inner if type(module).__name__ in names]
    if policy is not None:
        function = load_function(policy) if isinstance(policy, str) else policy
        if "recurse" in inspect.signature(function).parameters:
            wrapped = _by_fsdp1(backbone, function)[0]
        else:
            wrapped = [module for module in inner if function(module)]
        chosen = [module for module in inner if module in wrapped]
        if not chosen:
            raise ConfigError(f"wrap_policy_fn chose no module inside of this {type(backbone).__name__}")
        return chosen
    return [*next(iter(stacks_of(backbone, packed.num_layers)), ())]


def _by_fsdp1(module: nn.Module, policy: Callable[..., Any]) -> tuple[list[nn.Module], int]:
    """The modules that a policy of FSDP1 wraps, itself included, and the parameters in them."""
    total = sum(weight.numel() for weight in module.parameters())
    chosen: list[nn.Module] = []
    wrapped = 0
    if policy(module=module, recurse=True, nonwrapped_numel=total):
        for child in module.children():
            inner, count = _by_fsdp1(child, policy)
            chosen, wrapped = chosen + inner, wrapped + count
        if policy(module=module, recurse=False, nonwrapped_numel=total - wrapped):
            return [*chosen, module], total
    return chosen, wrapped
