"""Where the gradient of a weight goes: to autograd, or straight into the sum that an optimizer keeps.

A weight whose attribute `grad_sum` is set hands its gradients there, and autograd never holds them: no dense gradient
for a few rows of an embedding, none that lives until the last use of a tied weight has been passed.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.ordered_sums import sum_rows


class GradientSum(Protocol):
    """The sum of a weight's gradients."""

    def add(self, gradient: Tensor, start: int = 0) -> None:
        """The gradient of as many of the weight's rows as it has, from row `start`."""

    def add_rows(self, rows: Tensor, gradient: Tensor) -> None:
        """Row i of `gradient` `[N, d]` is added to row `rows[i]`, of `rows` `[N]`."""


def grad_sum(weight: Tensor | None) -> GradientSum | None:
    return cast("GradientSum | None", getattr(weight, "grad_sum", None))


def give(weight: Tensor | None, gradient: Tensor) -> Tensor | None:
    """Hand the gradient of `weight` to its sum; if it has none, return it, for autograd."""
    total = grad_sum(weight)
    if total is None:
        return gradient
    total.add(gradient)
    return None


class Embedding(torch.autograd.Function):
    """Rows of `weight` `[V, d]` at `tokens` `[T]`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(weight, tokens)
        return weight.index_select(0, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        weight, tokens = ctx.saved_tensors
        total = grad_sum(weight)
        if total is not None:
            total.add_rows(tokens, grads[0])
            return None, None
        return sum_rows(grads[0], tokens, len(weight)), None
