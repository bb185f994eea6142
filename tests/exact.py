"""Models in fp64 throughout."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class ExactRMSNorm(nn.Module):
    """transformers norms in fp32 whatever the dtype; this keeps fp64 models fp64 throughout."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


class ExactRouter(nn.Module):
    """The router of Qwen3's and Mixtral's experts in the dtype of its input: its softmax is in fp32 otherwise."""

    weight: torch.Tensor
    top_k: int

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = nn.functional.linear(x.flatten(0, -2), self.weight)
        scores, indices = logits.softmax(-1).topk(self.top_k, dim=-1)
        return logits, scores / scores.sum(-1, keepdim=True), indices


class ExactRotary(nn.Module):
    """Rotations at angles of the dtype of `x`: transformers' are in fp32, whose last digit depends on the processor."""

    config: Any

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
        steps = torch.arange(0, size, 2, dtype=x.dtype, device=x.device) / size
        angles = position_ids.to(x.dtype)[..., None] * self.config.rope_parameters["rope_theta"] ** -steps
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()


def rotate_in_fp64(model: nn.Module) -> None:
    """Let the plain rotary embeddings of a model compute in the model's own dtype."""
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            if module.rope_type != "default":
                raise ValueError(f"rotary embeddings of type '{module.rope_type}' have no exact form here")
            module.__class__ = ExactRotary


def norm_in_fp64(model: nn.Module) -> None:
    """Let the RMS norms and routers of a model compute in the model's own dtype."""
    for module in model.modules():
        if type(module).__name__ in ("Qwen3MoeTopKRouter", "MixtralTopKRouter"):
            module.__class__ = ExactRouter
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.__class__ = ExactRMSNorm
