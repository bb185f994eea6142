"""Functions of our own that gradients pass through: sums of rows, bounds, weights that have a sum for their gradients,
collectives.

Rows of one number are added in their order, so that sums repeat bit for bit. CUDA's `index_add_` adds by atomics, in
any order, and so does the backward of `index_select`. Its `index_put_(accumulate=True)` sorts the rows first, by a
stable sort, and adds them one after another; `index_add_` does the same itself under
`torch.use_deterministic_algorithms`, which is a setting of the whole process. On CPU it is the other way round:
`index_add_` goes through the rows in order, and `index_put_` may share them among threads.

A weight whose attribute `grad_sum` is set hands its gradients there, and autograd never holds them: no dense gradient
for a few rows of an embedding, none that lives until the last use of a tied weight has been passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad


def sum_rows(values: Tensor, index: Tensor, count: int) -> Tensor:
    """`[N, ...]` -> `[count, ...]`: row i is the sum of the `values` whose `index` `[N]` (int64) is i, else 0.
    Differentiable."""
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
    """`[M, ...]` -> `[N, ...]`: the rows at `index` `[N]` (int64), with repetitions. Differentiable."""
    return _through(values, lambda x: x.index_select(0, index), partial(sum_rows, index=index, count=len(values)))


class _Pass(torch.autograd.Function):
    """`forward(x)`, whose gradient is `backward` of the incoming one. Neither needs a tensor of the other."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor | None]
    ) -> Tensor:
        ctx.pass_back = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.pass_back(grads[0]), None, None


_through: Callable[[Tensor, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor | None]], Tensor] = _Pass.apply


def bounded(x: Tensor, low: float, high: float) -> Tensor:
    """`x` kept within [low, high], against overflow; its gradient beyond them stays 1 (0 for `clamp`)."""
    return _through(x, lambda x: x.clamp(low, high), lambda grad: grad)


def _index_add_is_ordered(device: torch.device) -> bool:
    return device.type == "cpu"


class GradientSum(Protocol):
    """The sum of a weight's gradients."""

    def add(self, gradient: Tensor, start: int = 0) -> None:
        """The gradient of as many of the weight's rows as it has, from row `start`."""

    def add_rows(self, rows: Tensor, gradient: Tensor) -> None:
        """Row i of `gradient` `[N, d]` is added to row `rows[i]`, of `rows` `[N]`."""


def grad_sum(weight: Tensor | None) -> GradientSum | None:
    return cast("GradientSum | None", getattr(weight, "grad_sum", None))


def give(weight: Tensor | None, gradient: Tensor) -> Tensor | None:
    """Hand the gradient of `weight` to its sum, or return it for autograd."""
    if (total := grad_sum(weight)) is None:
        return gradient
    total.add(gradient)
    return None


def embedding(weight: Tensor, tokens: Tensor) -> Tensor:
    """Rows of `weight` `[V, d]` at `tokens` `[T]`."""

    def backward(grad: Tensor) -> Tensor | None:
        if (total := grad_sum(weight)) is None:
            return sum_rows(grad, tokens, len(weight))
        total.add_rows(tokens, grad)
        return None

    return _through(weight, lambda x: x.index_select(0, tokens), backward)


def summed(x: Tensor, group: Any) -> Tensor:
    """The sum of `x` over ranks. Every rank uses it alike, so its gradient is each one's own."""
    return _through(x, partial(_all_reduced, group=group), lambda grad: grad)


def shared(x: Tensor, group: Any) -> Tensor:
    """`x`, which is equal on all ranks, for ranks that use it differently: its gradient is the sum of theirs."""
    return _through(x, lambda x: x.view_as(x), partial(_all_reduced, group=group))


def joined(x: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
    """The last dimension of all ranks' `x` as one, `sizes` of it from each. Every rank uses it alike, so each takes its
    own part of the gradient."""
    rank = dist.get_rank(group)
    return _through(x, lambda x: _gathered(x, sizes, group), lambda grad: grad.split(sizes, -1)[rank])


def split(x: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
    """This rank's part of the last dimension of `x`, which is equal on all ranks."""
    rank = dist.get_rank(group)
    return _through(x, lambda x: x.split(sizes, -1)[rank].contiguous(), lambda grad: _gathered(grad, sizes, group))


def exchange(x: Tensor, group: Any, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """All-to-all along the first dimension: the first `sent[0]` rows of `x` go to the group's first rank, and so on;
    `received[i]` rows of the result come from rank i."""

    def pass_on(x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        result = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(result, x.contiguous(), received, sent, group=group)
        return result

    counts = list(sent), list(received)
    return _through(x, lambda x: pass_on(x, *counts), lambda grad: pass_on(grad, *reversed(counts)))


def _gathered(x: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
    most = max(sizes)  # gloo takes tensors of one size
    parts = [x.new_empty((*x.shape[:-1], most)) for _ in sizes]
    dist.all_gather(parts, pad(x, (0, most - x.shape[-1])).contiguous(), group=group)
    return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)


def _all_reduced(x: Tensor, group: Any) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
