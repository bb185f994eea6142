"""Gradient checkpointing: activations are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def enable_checkpointing(model: Any) -> None:
    """Switch it on for a transformers model that has it; its dropout probabilities become zero for good."""
    # Older versions of transformers have the second name only.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)
        if hasattr(module, "_gradient_checkpointing_func"):
            # Nothing is random: there is no generator state to keep for the recomputation.
            module._gradient_checkpointing_func = partial(
                checkpoint, partial(_evaluated, module), use_reentrant=False, preserve_rng_state=False
            )


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """Inside, forwards keep no activations of layers: transformers recomputes in training mode only."""
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module.training = True
    try:
        yield
    finally:
        model.eval()


def _evaluated(module: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
    """A function of a module, which is in evaluation mode meanwhile: whatever noise it would add in training stays
    off."""
    before, module.training = module.training, False
    try:
        return function(*args)
    finally:
        module.training = before
