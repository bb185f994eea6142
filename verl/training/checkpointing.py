"""Gradient checkpointing: activations are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
            module._gradient_checkpointing_func = _Checkpoint(module)


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


class _Checkpoint:
    """The checkpointing function of a module. The module itself runs in evaluation mode, so that whatever noise it
    would add in training stays off."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        # Nothing is random: there is no generator state to keep for the recomputation.
        return checkpoint(self._evaluated, function, *args, use_reentrant=False, preserve_rng_state=False)

    def _evaluated(self, function: Callable[..., Any], *args: Any) -> Any:
        before, self.module.training = self.module.training, False
        try:
            return function(*args)
        finally:
            self.module.training = before
