"""Sums of the rows of one number, in the order of the rows: they repeat bit for bit.

CUDA's `index_add_` adds by atomics, in any order, and so does the backward of `index_select`. Its
`index_put_(accumulate=True)` sorts the rows first, by a stable sort, and adds them one after another; `index_add_` does
the same itself under `torch.use_deterministic_algorithms`, which is a setting of the whole process. On CPU it is the
other way round: `index_add_` goes through the rows in order, and `index_put_` may share them among threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def sum_rows(values: Tensor, index: Tensor, count: int) -> Tensor:
    """`[N, ...]` -> `[count, ...]`: row i is the sum of the `values` whose `index` `[N]` (int64) is i, 0 if there are
    none. Differentiable."""
    zeros = values.new_zeros((count, *values.shape[1:]))
    if _index_add_is_ordered(values.device):
        return zeros.index_add(0, index, values)
    return zeros.index_put((index,), values, accumulate=True)


def add_rows(total: Tensor, index: Tensor, values: Tensor, scale: float = 1.0) -> None:
    """Add `scale` times row i of `values` `[N, ...]` to row `index[i]` of `total`, in place."""
    values = values.to(total.dtype)
    if _index_add_is_ordered(total.device):
        total.index_add_(0, index, values, alpha=scale)
    else:
        total.index_put_((index,), values if scale == 1.0 else values * scale, accumulate=True)


def take_rows(values: Tensor, index: Tensor) -> Tensor:
    """`[M, ...]` -> `[N, ...]`: the rows at `index` `[N]` (int64), with repetitions. Differentiable once."""
    taken: Tensor = _Rows.apply(values, index)  # type: ignore[no-untyped-call]
    return taken


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = len(values)
        return values.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return sum_rows(grads[0], index, ctx.count), None


def _index_add_is_ordered(device: torch.device) -> bool:
    return device.type == "cpu"
