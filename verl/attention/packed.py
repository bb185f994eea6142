"""Causal attention over buckets of rows in a flat row of tokens.

On CPU it is written out in matrix products: torch's flash kernel for CPU is several times slower at the
lengths of training rows, above all in the backward. What stands between the products (gathering heads, softmax,
scattering) is compiled where it can be. Query heads are folded onto their key/value head, so keys are never
repeated for heads; scores exist for one piece of bounded size at a time and are computed again in the backward, so
nothing is kept but query, key and value. The softmax is fp32 (fp64 for fp64). Elsewhere each bucket is one call
of SDPA.

Shapes: T flat tokens, B rows of a bucket, L its longest row, P length of its longest prefix, M >= P + L keys, C
queries of a piece, H query heads, K key/value heads, G = H / K, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from verl.kernels.compiled import VECTOR, layer_kernels
from verl.ordered_sums import add_rows

if TYPE_CHECKING:
    from verl.kernels.interface import Kernels

# Scores of one piece on CPU, for one head: the passes over those of all heads should stay in the cache.
PIECE = 1 << 16
_NO_WINDOW = 1 << 40


@dataclass(frozen=True)
class Row:
    """Tokens `start` to `start + length` of the flat row, causal; they also see all of their parent's, as those of a
    response see the prompt. A parent has none itself: what reads `prefix` goes up one level."""

    start: int
    length: int
    parent: Row | None = None

    @property
    def prefix(self) -> tuple[int, int]:
        """Start and length of what stands before it."""
        return (0, 0) if self.parent is None else (self.parent.start, self.parent.length)


class Bucket:
    """Rows that are attended in one go, padded to the longest.

    The keys of a row are laid out as its prefix, padded to P, then itself, padded; in all a multiple of the
    vector length.
    """

    def __init__(self, rows: list[Row], device: torch.device | str = "cpu") -> None:
        self.rows = rows
        self.longest = max(row.length for row in rows)
        self.longest_prefix = max(row.prefix[1] for row in rows)
        self.num_keys = -(-(self.longest_prefix + self.longest) // VECTOR) * VECTOR
        self.device = torch.device(device)
        self._masks: dict[int, Tensor] = {}

    @cached_property
    def queries(self) -> Tensor:
        """Index of each row's tokens in the flat row, `[B, L]`; -1 in the padding."""
        return self._index([[(row.start, row.length, 0)] for row in self.rows], self.longest)

    @cached_property
    def keys(self) -> Tensor:
        """Index of what each row may see, `[B, M]`; -1 in the padding."""
        parts = [[(*row.prefix, 0), (row.start, row.length, self.longest_prefix)] for row in self.rows]
        return self._index(parts, self.num_keys)

    @cached_property
    def before(self) -> Tensor:
        """Length of each row's prefix, `[B]`."""
        return torch.tensor([row.prefix[1] for row in self.rows], device=self.device)

    def mask(self, window: int) -> Tensor:
        """Which of M keys each of L queries sees, `[B, L, M]`."""
        if window not in self._masks:
            query = torch.arange(self.longest, device=self.device)[:, None]
            key = torch.arange(self.num_keys, device=self.device)
            own = key - self.longest_prefix
            before = self.before[:, None, None]
            in_prefix = (key < before) & (before + query - key < window)
            self._masks[window] = in_prefix | ((own >= 0) & (own <= query) & (query - own < window))
        return self._masks[window]

    def _index(self, parts: list[list[tuple[int, int, int]]], width: int) -> Tensor:
        index = torch.full((len(parts), width), -1)
        for row, pieces in enumerate(parts):
            for start, length, at in pieces:
                index[row, at : at + length] = torch.arange(start, start + length)
        return index.to(self.device)


def attend(
    query: Tensor, key: Tensor, value: Tensor, buckets: list[Bucket], scale: float, window: int | None
) -> Tensor:
    """query `[T, H, D]`, key and value `[T, K, D]` -> `[T, H, D]`; every flat token is in one row of one bucket."""
    # Under autocast, rotary embeddings leave query and key in fp32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if query.device.type == "cpu":
        output: Tensor = _CpuAttention.apply(  # type: ignore[no-untyped-call]
            query, key, value, buckets, scale, _NO_WINDOW if window is None else window
        )
        return output
    return sdpa_attend(query, key, value, buckets, scale, window)


def sdpa_attend(
    query: Tensor, key: Tensor, value: Tensor, buckets: list[Bucket], scale: float, window: int | None
) -> Tensor:
    """`attend` by one SDPA call a bucket."""
    output = torch.empty_like(query)
    for bucket in buckets:
        index = bucket.queries.clamp(min=0)
        plain = not bucket.longest_prefix and (window is None or window >= bucket.longest)
        seen = index if plain else bucket.keys.clamp(min=0)
        mixed = scaled_dot_product_attention(
            query[index].transpose(1, 2),
            key[seen].transpose(1, 2),
            value[seen].transpose(1, 2),
            attn_mask=None if plain else bucket.mask(_NO_WINDOW if window is None else window)[:, None],
            is_causal=plain,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        real = bucket.queries >= 0
        output = output.index_copy(0, bucket.queries[real], mixed.transpose(1, 2)[real])
    return output


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, buckets: list[Bucket], scale: float, window: int
    ) -> Tensor:
        query, key, value = (x.contiguous() for x in (query, key, value))
        ctx.save_for_backward(query, key, value)
        ctx.buckets, ctx.scale, ctx.window = buckets, scale, window
        output = torch.empty_like(query)
        for bucket in buckets:
            steps = _steps(bucket, scale, window, query)
            keys, values = (steps.gather(x, bucket.keys).flatten(0, 1) for x in (key, value))
            for start, stop, seen in _pieces(bucket):
                q = steps.gather(query, bucket.queries[:, start:stop])
                scores = torch.bmm(_fold(q, keys), keys[:, :seen].mT)
                p = steps.softmax(scores.view(*q.shape[:3], seen), start)
                mixed = torch.bmm(p.view(scores.shape), values[:, :seen])
                steps.scatter(mixed.view(q.shape), output, start)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        outer = grads[0].contiguous()
        grad_query = torch.empty_like(query)
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32
        grad_key, grad_value = torch.zeros_like(key, dtype=exact), torch.zeros_like(value, dtype=exact)
        for bucket in ctx.buckets:
            steps = _steps(bucket, ctx.scale, ctx.window, query)
            keys, values = (steps.gather(x, bucket.keys).flatten(0, 1) for x in (key, value))
            to_keys, to_values = torch.zeros_like(keys), torch.zeros_like(values)
            for start, stop, seen in _pieces(bucket):
                index = bucket.queries[:, start:stop]
                heads = steps.gather(query, index)
                q, out = _fold(heads, keys), _fold(steps.gather(outer, index), keys)
                scores, to_p = torch.bmm(q, keys[:, :seen].mT), torch.bmm(out, values[:, :seen].mT)
                shape = (*heads.shape[:3], seen)
                p, to_scores = steps.softmax_backward(scores.view(shape), to_p.view(shape), start)
                to_values[:, :seen] += torch.bmm(p.view(scores.shape).mT, out)
                to_keys[:, :seen] += torch.bmm(to_scores.view(scores.shape).mT, q)
                to_queries = torch.bmm(to_scores.view(scores.shape), keys[:, :seen])
                steps.scatter(to_queries.view(heads.shape), grad_query, start)
            for total, found in ((grad_key, to_keys), (grad_value, to_values)):
                steps.scatter_add(found.unflatten(0, (len(bucket.rows), -1)), total)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


def _pieces(bucket: Bucket) -> Iterator[tuple[int, int, int]]:
    """First and last query of pieces of bounded size, and how many keys are all that they can see."""
    most = max(1, PIECE // (len(bucket.rows) * bucket.num_keys))
    for start in range(0, bucket.longest, most):
        stop = min(start + most, bucket.longest)
        yield start, stop, min(bucket.num_keys, -(-(bucket.longest_prefix + stop) // VECTOR) * VECTOR)


def _fold(heads: Tensor, keys: Tensor) -> Tensor:
    """`[B, H, C, D]` -> `[B * K, G * C, D]`."""
    return heads.view(keys.shape[0], -1, heads.shape[-1])


class _TorchSteps:
    """What stands between the matrix products of a bucket, in torch."""

    def __init__(self, bucket: Bucket, scale: float, window: int) -> None:
        self.bucket = bucket
        self.scale = scale
        self.window = window

    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        """`[T, H, D]` at `[B, L]` -> `[B, H, L, D]`, zeros where the index is -1."""
        rows = x[index.clamp(min=0)].masked_fill_((index < 0)[..., None, None], 0)
        return rows.transpose(1, 2).contiguous()

    def scatter(self, rows: Tensor, out: Tensor, start: int) -> None:
        """The inverse, for the bucket's queries from `start`."""
        index = self.bucket.queries[:, start : start + rows.shape[2]]
        out.index_copy_(0, index[index >= 0], rows.transpose(1, 2)[index >= 0])

    def scatter_add(self, rows: Tensor, total: Tensor) -> None:
        """Add what the bucket's keys got, `[B, K, M, D]`, to `[T, K, D]`."""
        real = self.bucket.keys >= 0
        add_rows(total, self.bucket.keys[real], rows.transpose(1, 2)[real])

    def softmax(self, scores: Tensor, start: int) -> Tensor:
        """Probabilities of scores `[B, H, C, M]` of the queries from `start`."""
        return self._softmax(scores, start).to(scores.dtype)

    def softmax_backward(self, scores: Tensor, grad: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Probabilities, and the gradient of the scores given that of the probabilities."""
        p = self._softmax(scores, start)
        to_scores = torch._softmax_backward_data(grad.to(p.dtype), p, -1, p.dtype).mul_(self.scale)
        return p.to(scores.dtype), to_scores.to(scores.dtype)

    def _softmax(self, scores: Tensor, start: int) -> Tensor:
        exact = scores if scores.dtype == torch.float64 else scores.float()
        mask = self.bucket.mask(self.window)[:, None, start : start + scores.shape[2], : scores.shape[3]]
        return torch.softmax((exact * self.scale).masked_fill_(~mask, float("-inf")), -1)


class _CompiledSteps(_TorchSteps):
    """The same, compiled."""

    def __init__(self, bucket: Bucket, scale: float, window: int, compiled: Kernels) -> None:
        super().__init__(bucket, scale, window)
        self.kernels = compiled

    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        return self.kernels.gather(x, index.contiguous())

    def scatter(self, rows: Tensor, out: Tensor, start: int) -> None:
        self.kernels.scatter(rows, self.bucket.queries, out, start)

    def scatter_add(self, rows: Tensor, total: Tensor) -> None:
        self.kernels.scatter_add(rows, self.bucket.keys, total)

    def softmax(self, scores: Tensor, start: int) -> Tensor:
        self._in_place(scores, start, None)
        return scores

    def softmax_backward(self, scores: Tensor, grad: Tensor, start: int) -> tuple[Tensor, Tensor]:
        self._in_place(scores, start, grad)
        return scores, grad

    def _in_place(self, scores: Tensor, start: int, grad: Tensor | None) -> None:
        bucket = self.bucket
        self.kernels.softmax(scores, bucket.before, bucket.longest_prefix, start, self.window, self.scale, grad)


def _steps(bucket: Bucket, scale: float, window: int, like: Tensor) -> _TorchSteps:
    compiled = layer_kernels(like.dtype, like.device)
    if compiled is None or like.shape[-1] % VECTOR:
        return _TorchSteps(bucket, scale, window)
    return _CompiledSteps(bucket, scale, window, compiled)
