"""Collectives that gradients pass through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad


def summed(x: Tensor, group: Any) -> Tensor:
    """The sum over ranks of what each of them computed. Every rank uses it alike, so its gradient is each one's own."""
    result: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def shared(x: Tensor, group: Any) -> Tensor:
    """`x`, which is equal on all ranks, for ranks that use it differently: its gradient is the sum of theirs."""
    result: Tensor = _SumOfGradients.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def joined(x: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
    """The last dimension of all ranks' `x` as one, `sizes` of it from each. Every rank uses it alike, so each takes its
    own part of the gradient."""
    result: Tensor = _Join.apply(x, sizes, group)  # type: ignore[no-untyped-call]
    return result


def split(x: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
    """This rank's part of the last dimension of `x`, which is equal on all ranks."""
    result: Tensor = _Split.apply(x, sizes, group)  # type: ignore[no-untyped-call]
    return result


def exchange(x: Tensor, group: Any, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """All-to-all along the first dimension: the first `sent[0]` rows of `x` go to the group's first rank, and so on;
    `received[i]` rows of the result come from rank i."""
    result: Tensor = _Exchange.apply(x, group, list(sent), list(received))  # type: ignore[no-untyped-call]
    return result


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(grads[0], ctx.group), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _gathered(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].split(ctx.sizes, -1)[dist.get_rank(ctx.group)], None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        parts: tuple[Tensor, ...] = x.split(sizes, -1)
        return parts[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grads[0], ctx.sizes, ctx.group), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, sent: list[int], received: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _exchanged(x, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grads[0], ctx.group, ctx.received, ctx.sent), None, None, None


def _exchanged(x: Tensor, group: Any, sent: list[int], received: list[int]) -> Tensor:
    result = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(result, x.contiguous(), received, sent, group=group)
    return result


def _gathered(x: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
    most = max(sizes)  # gloo takes tensors of one size
    parts = [x.new_empty((*x.shape[:-1], most)) for _ in sizes]
    dist.all_gather(parts, pad(x, (0, most - x.shape[-1])).contiguous(), group=group)
    return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)


def _all_reduced(x: Tensor, group: Any) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
