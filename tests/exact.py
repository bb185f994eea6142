"""Models in fp64 throughout."""

from __future__ import annotations

import torch
from torch import nn


class ExactRMSNorm(nn.Module):
    """transformers norms in fp32 whatever the dtype; this keeps fp64 models fp64 throughout."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


def norm_in_fp64(model: nn.Module) -> None:
    """Let the RMS norms of a model compute in the model's own dtype."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.__class__ = ExactRMSNorm
