"""The compiled kernels, on CPU where there is a compiler. For any other device they are neither built nor loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from verl.kernels.interface import Kernels

#: Sizes that the elementwise kernels take are multiples of this.
VECTOR = 16


def kernels(dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """The kernels for tensors of this dtype and device (bf16, fp32 and fp64 on CPU), or None."""
    if device.type != "cpu":
        return None
    from verl.kernels.interface import load

    return load(dtype)


def layer_kernels(dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """The kernels for what stands between the matrix products of layers and head, in bf16 and fp32; or None."""
    return None if dtype == torch.float64 else kernels(dtype, device)


def accumulate(total: Tensor, x: Tensor, scale: float, add: bool) -> None:
    """`total += scale * x`, or without `add` `total = scale * x`; of one shape."""
    if x.dtype == torch.bfloat16 and total.dtype == torch.float32 and x.numel() % VECTOR == 0:
        compiled = kernels(x.dtype, x.device) if x.is_contiguous() and total.is_contiguous() else None
        if compiled is not None:
            compiled.accumulate(total, x, scale, add)
            return
    if add:
        total.add_(x, alpha=scale)
    else:
        total.copy_(x).mul_(scale)
