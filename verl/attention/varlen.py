"""Causal attention over a flat row of tokens by one call a layer of torch's flash attention for sequences of
different lengths (`torch.nn.attention.varlen.varlen_attn`), or of flash-attn's.

The queries of the call are the flat row as it stands. Its keys are gathered: before its own keys each row has those of
its prefix, so nothing is padded and there is no mask. In the backward the gradients of a prefix's copies are added in
the order of its rows, in fp32 at least: the same sum bit for bit each time, which atomic additions would not give.

Shapes: T flat tokens, N rows, U gathered keys, P tokens of prefixes, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl._host.device import to_device

if TYPE_CHECKING:
    from verl.attention.segments import Row

_HOST = torch.device("cpu")


class Ragged:
    """Where the keys of each row lie in the flat row.

    Args:
        rows: in the order of the flat row, which they cover.

    Attributes:
        cu_seq_q, cu_seq_k: `[N + 1]` int32, where the queries and the gathered keys of each row begin.
        keys: `[U]` int64, the gathered keys in the flat row; None where they are the flat row.
    """

    def __init__(self, rows: Sequence[Row], device: torch.device = _HOST) -> None:
        def ints(values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
            return to_device(torch.tensor(values, dtype=dtype), device)

        lengths, seen = [row.length for row in rows], [len(row.prefix) + row.length for row in rows]
        self.max_q, self.max_k = max(lengths), max(seen)
        self.cu_seq_q, self.cu_seq_k = (ints([0, *accumulate(sizes)], torch.int32) for sizes in (lengths, seen))
        self.keys: Tensor | None = None
        if lengths == seen:
            return
        keys: list[int] = []
        own_keys: list[int] = []
        copies: defaultdict[int, list[int]] = defaultdict(list)
        for row in rows:
            for token in row.prefix.tolist():
                copies[token].append(len(keys))
                keys.append(token)
            own_keys.extend(range(len(keys), len(keys) + row.length))
            keys.extend(range(row.start, row.start + row.length))
        self.keys, self._own = ints(keys), ints(own_keys)
        # The first copies of all tokens that have one, then the second ones, ...: those with most copies come first.
        shared = sorted(copies, key=lambda token: -len(copies[token]))
        rounds = zip_longest(*(copies[token] for token in shared))
        self._shared = ints(shared)
        self._rounds = [ints([copy for copy in copies_of if copy is not None]) for copies_of in rounds]

    def gather(self, x: Tensor) -> Tensor:
        """`[T, K, D]` -> `[U, K, D]`."""
        return x if self.keys is None else _Gather.apply(x, self)  # type: ignore[no-untyped-call]

    def add_copies(self, grad: Tensor) -> Tensor:
        """The gradient of `[T, K, D]`, given that of its copies `[U, K, D]`."""
        total = grad.index_select(0, self._own)
        exact = torch.promote_types(grad.dtype, torch.float32)
        added = total.index_select(0, self._shared).to(exact)
        for copies in self._rounds:
            added[: len(copies)] += grad.index_select(0, copies)
        return total.index_copy_(0, self._shared, added.to(grad.dtype))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ragged: Ragged) -> Tensor:
        ctx.ragged = ragged
        return x.index_select(0, ragged.keys)  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.ragged.add_copies(grads[0]), None


def varlen_attend(
    kernel: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ragged: Ragged,
    scale: float,
    window: int | None,
) -> Tensor:
    """query `[T, H, D]`, key and value `[T, K, D]` -> `[T, H, D]`. `window`: tokens that each sees, itself included."""
    # Under autocast, rotary embeddings leave query and key in fp32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    return kernel(
        query,
        ragged.gather(key),
        ragged.gather(value),
        ragged.cu_seq_q,
        ragged.cu_seq_k,
        ragged.max_q,
        ragged.max_k,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
