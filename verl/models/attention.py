"""Causal attention over buckets of rows in a flat row of tokens.

On CPU it is written out in matrix products: torch's flash kernel for CPU is several times slower at the
lengths of training rows, above all in the backward, and cannot read a shared prompt in place. Query heads
are folded onto their key/value head, so keys are never repeated; scores exist for one piece of bounded size
at a time and are computed again in the backward, so nothing is kept but query, key and value. The softmax
is fp32 (fp64 for fp64). Elsewhere each bucket is one call of SDPA.

Shapes: T flat tokens, B rows of a bucket, L its longest row, P length of the prefix that its rows share,
M = P + L keys, C queries of a piece, H query heads, K key/value heads, G = H / K, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

# Scores of one piece on CPU, for one head: the passes over those of all heads should stay in the cache.
# Measured on rows of 64 to 2048 tokens with 9 heads, sizes from 2^15 to 2^17 are equally good, 2^19 takes
# up to three times as long.
PIECE = 1 << 16


@dataclass
class Bucket:
    """Contiguous causal rows of the flat row, from `start`; each also sees all of `prefix` (start,
    length)."""

    start: int
    lengths: list[int]
    prefix: tuple[int, int] = (0, 0)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.longest = max(self.lengths)
        self.size = sum(self.lengths)
        self.equal = min(self.lengths) == self.longest

    def slice(self, x: Tensor) -> Tensor:
        return x.narrow(0, self.start, self.size)

    def before(self, x: Tensor) -> Tensor:
        """The prefix of keys or values, `[P, K, D]`."""
        return x.narrow(0, *self.prefix)

    def mask(self, window: int | None) -> Tensor:
        """Which of M keys each of L queries sees, `[L, M]`."""
        keys = self.prefix[1] + self.longest
        window = None if window is None or window >= keys else window
        if window not in self._masks:
            i = torch.arange(self.prefix[1], keys, device=self.device)[:, None]
            j = torch.arange(keys, device=self.device)[None]
            self._masks[window] = (j <= i) if window is None else (j <= i) & (i - j < window)
        return self._masks[window]

    @cached_property
    def _index(self) -> tuple[Tensor, Tensor]:
        """Where the `B * L` places of the padded rows read, and which of them are real."""
        lengths = torch.tensor(self.lengths)[:, None]
        column = torch.arange(self.longest)
        real = column < lengths
        index = torch.where(real, lengths.cumsum(0) - lengths + column, 0).flatten()
        return index.to(self.device), real.flatten().nonzero()[:, 0].to(self.device)

    def pad(self, x: Tensor) -> Tensor:
        """`[size, ...]` -> `[B, L, ...]`; padding repeats the first token and must not be read."""
        if not self.equal:
            x = x.index_select(0, self._index[0])
        return x.view(len(self.lengths), self.longest, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """`[B, L, ...]` -> `[size, ...]`."""
        return x.flatten(0, 1) if self.equal else x.flatten(0, 1).index_select(0, self._index[1])

    def zero_pad(self, x: Tensor) -> Tensor:
        """`[size, ...]` -> `[B, L, ...]` with zeros in the padding."""
        if self.equal:
            return self.pad(x)
        padded = x.new_zeros((len(self.lengths) * self.longest, *x.shape[1:]))
        padded.index_copy_(0, self._index[1], x)
        return padded.view(len(self.lengths), self.longest, *x.shape[1:])


def attend(
    query: Tensor, key: Tensor, value: Tensor, buckets: list[Bucket], scale: float, window: int | None
) -> Tensor:
    """query `[T, H, D]`, key and value `[T, K, D]` -> `[T, H, D]`; buckets cover the flat row in order."""
    # Under autocast, rotary embeddings leave query and key in fp32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if query.device.type == "cpu":
        output: Tensor = _CpuAttention.apply(query, key, value, buckets, scale, window)  # type: ignore[no-untyped-call]
        return output
    return sdpa_attend(query, key, value, buckets, scale, window)


def sdpa_attend(
    query: Tensor, key: Tensor, value: Tensor, buckets: list[Bucket], scale: float, window: int | None
) -> Tensor:
    """`attend` by one SDPA call a bucket."""
    outputs = []
    for bucket in buckets:
        q, k, v = (bucket.pad(bucket.slice(x)) for x in (query, key, value))
        keys = bucket.prefix[1] + bucket.longest
        plain = not bucket.prefix[1] and (window is None or window >= keys)
        if bucket.prefix[1]:
            k, v = (
                torch.cat([bucket.before(x).expand(len(q), -1, -1, -1), own], 1) for x, own in ((key, k), (value, v))
            )
        output = scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=None if plain else bucket.mask(window),
            is_causal=plain,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(bucket.unpad(output.transpose(1, 2)))
    return torch.cat(outputs)


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        buckets: list[Bucket],
        scale: float,
        window: int | None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.buckets, ctx.scale, ctx.window = buckets, scale, window
        output = torch.empty(query.shape, dtype=query.dtype)
        groups = query.shape[1] // key.shape[1]
        for bucket in buckets:
            queries, keys, values = bucket.pad(bucket.slice(query)), _keys(bucket, key), _keys(bucket, value)
            rows = []
            for piece in _pieces(bucket):
                q, k, v = _fold(queries[:, piece], groups), *(_seen(x, bucket, piece) for x in (keys, values))
                p = _probabilities(q, k, _bias(bucket, piece, window), scale)
                rows.append(_unfold(torch.bmm(p.to(q.dtype), v), queries[:, piece]))
            bucket.slice(output).copy_(bucket.unpad(rows[0] if len(rows) == 1 else torch.cat(rows, 1)))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        grad_query, grad_key, grad_value = (torch.empty(x.shape, dtype=x.dtype) for x in (query, key, value))
        groups = query.shape[1] // key.shape[1]
        for bucket in ctx.buckets:
            queries, keys, values = bucket.pad(bucket.slice(query)), _keys(bucket, key), _keys(bucket, value)
            outer = bucket.zero_pad(bucket.slice(grads[0]))
            to_queries, to_keys, to_values = [], torch.zeros_like(keys), torch.zeros_like(values)
            for piece in _pieces(bucket):
                q, k, v = _fold(queries[:, piece], groups), *(_seen(x, bucket, piece) for x in (keys, values))
                out = _fold(outer[:, piece], groups)
                p = _probabilities(q, k, _bias(bucket, piece, ctx.window), ctx.scale)
                _seen(to_values, bucket, piece).add_(torch.bmm(p.to(q.dtype).mT, out))
                to_p = torch.bmm(out, v.mT).to(p.dtype)
                to_scores = torch._softmax_backward_data(to_p, p, -1, p.dtype).mul_(ctx.scale).to(q.dtype)
                _seen(to_keys, bucket, piece).add_(torch.bmm(to_scores.mT, q))
                to_queries.append(_unfold(torch.bmm(to_scores, k), queries[:, piece]))
            bucket.slice(grad_query).copy_(bucket.unpad(torch.cat(to_queries, 1)))
            for grad, found in ((grad_key, to_keys), (grad_value, to_values)):
                by_row = found.unflatten(0, (len(queries), -1)).transpose(1, 2)  # [B, M, K, D]
                length = bucket.prefix[1]
                bucket.slice(grad).copy_(bucket.unpad(by_row[:, length:]))
                if length:  # its own bucket came before this one
                    bucket.before(grad).add_(by_row[:, :length].sum(0))
        return grad_query, grad_key, grad_value, None, None, None


def _pieces(bucket: Bucket) -> Iterator[slice]:
    """Queries of a bucket, in pieces of bounded size."""
    most = max(1, PIECE // (len(bucket.lengths) * (bucket.prefix[1] + bucket.longest)))
    for start in range(0, bucket.longest, most):
        yield slice(start, min(start + most, bucket.longest))


def _keys(bucket: Bucket, x: Tensor) -> Tensor:
    """Keys or values of every row, the prefix before them: `[B * K, M, D]`."""
    rows = bucket.pad(bucket.slice(x))
    if bucket.prefix[1]:
        rows = torch.cat([bucket.before(x).expand(len(rows), -1, -1, -1), rows], 1)
    return rows.transpose(1, 2).flatten(0, 1)


def _seen(keys: Tensor, bucket: Bucket, piece: slice) -> Tensor:
    """What the queries of a piece can see at all: nothing after its last."""
    return keys[:, : bucket.prefix[1] + piece.stop]


def _bias(bucket: Bucket, piece: slice, window: int | None) -> Tensor:
    """0 where a query of the piece sees a key, else -inf: `[C, M]`."""
    hidden = ~bucket.mask(window)[piece, : bucket.prefix[1] + piece.stop]
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


def _fold(rows: Tensor, groups: int) -> Tensor:
    """`[B, C, H, D]` -> `[B * K, G * C, D]`."""
    count, length, heads, size = rows.shape
    by_head = rows.view(count, length, heads // groups, groups, size).permute(0, 2, 3, 1, 4)
    return by_head.reshape(count * heads // groups, groups * length, size)


def _unfold(folded: Tensor, like: Tensor) -> Tensor:
    """`[B * K, G * C, D]` -> `[B, C, H, D]`, the shape of `like`."""
    count, length, heads, size = like.shape
    return folded.reshape(count, heads, length, size).transpose(1, 2)


def _probabilities(query: Tensor, key: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Softmax of the scores, `[B * K, G * C, M]`, in fp32 (fp64 for fp64)."""
    scores = torch.bmm(query, key.mT).unflatten(1, (-1, bias.shape[0]))
    return torch.softmax(torch.add(bias, scores, alpha=scale), -1).flatten(1, 2)
