"""Which modules FSDP cuts, gathers and frees as a unit; what is in none of them is one with the root."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from verl.errors import ConfigError, nearest
from verl.models.packed import PackedModel
from verl.training.options import FSDPConfig
from verl.user_functions import load_function


def units(packed: PackedModel, config: FSDPConfig) -> list[nn.Module]:
    """The units of a model in the order of its modules: its layers, or those that a policy names.

    The embedding and the head stay with the root: they may be one tensor.

    Raises:
        ConfigError: the policy names no module of the model.
    """
    backbone, embedding = packed.backbone, packed.model.get_input_embeddings()
    inner = [module for module in backbone.modules() if module not in (backbone, embedding)]
    names, policy = config.wrap_policy.transformer_layer_cls_to_wrap, config.wrap_policy_fn
    if names is not None:
        known = sorted({type(module).__name__ for module in inner})
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(
                f"wrap_policy.transformer_layer_cls_to_wrap: no module of this {type(backbone).__name__} is a "
                f"'{unknown[0]}': {nearest(unknown[0], known)}"
            )
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
    stacks = [module for module in inner if isinstance(module, nn.ModuleList)]
    return [*next((stack for stack in stacks if len(stack) == packed.num_layers), ())]


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
