"""Causal attention over a flat row of tokens by one call a layer of torch's flash attention for sequences of
different lengths (`torch.nn.attention.varlen.varlen_attn`), or of flash-attn's.

The queries of the call are the flat row itself. Its keys are gathered: each row has its prefix's keys before its own,
so nothing is padded and there is no mask. In the backward the gradients of a prefix's copies are added in the order of
its rows, in fp32 at least: the same sum bit for bit each time, which atomic additions would not give.

Legend: T flat tokens, N rows, U gathered keys, P tokens of prefixes, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl._host.device import to_device

if TYPE_CHECKING:
    from verl.attention.segments import Row

_HOST = torch.device("cpu")


class VarlenKeys:
    """Where the keys of each row of a packed (varlen) batch lie in the flat row.

    Args:
        rows: in the order of the flat row, which they cover.

    Attributes:
        cu_seq_q, cu_seq_k: `[N + 1]` int32, where the queries and the gathered keys of each row begin.
        keys: `[U]` int64, the gathered keys in the flat row; None where they are the flat row.
        local: `[T]` int64, where the key of each token's own row is among them.
        shared: `[P]` int64, the tokens of prefixes, those with most copies first.
        rounds: of the first copies of all of them, of the second ones, ...: where they are among the gathered keys.
    """

    def __init__(self, rows: Sequence[Row], device: torch.device = _HOST) -> None:
        lengths, seen = [row.length for row in rows], [len(row.prefix) + row.length for row in rows]
        self.max_q, self.max_k = max(lengths), max(seen)
        begins = torch.tensor([[0, *accumulate(sizes)] for sizes in (lengths, seen)], dtype=torch.int32)
        self.cu_seq_q, self.cu_seq_k = to_device(begins, device)
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
        # The first copies of all tokens that have one, then the second ones, ...: those with most copies come first.
        shared = sorted(copies, key=lambda token: -len(copies[token]))
        rounds = zip_longest(*(copies[token] for token in shared))
        self.keys, self.local, self.shared, *self.rounds = (
            to_device(torch.tensor([i for i in index if i is not None]), device)
            for index in (keys, own_keys, shared, *rounds)
        )

    def attend(
        self, kernel: Any, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """The attention output `[T, H, D]`. `window`: tokens that each sees, itself included."""
        # Under autocast, rotary embeddings leave query and key in fp32.
        q_THD, k_TKD = q_THD.to(v_TKD.dtype), k_TKD.to(v_TKD.dtype)
        lists = (self.cu_seq_q, self.cu_seq_k, self.max_q, self.max_k)
        window_size = (-1 if window is None else window - 1, 0)
        options = {"scale": scale, "window_size": window_size, "enable_gqa": q_THD.shape[1] != k_TKD.shape[1]}
        k_UKD, v_UKD = k_TKD, v_TKD
        if self.keys is not None:
            k_UKD, v_UKD = (_Gather.apply(x_TKD, self) for x_TKD in (k_TKD, v_TKD))  # type: ignore[no-untyped-call]
        out_THD: Tensor = kernel(q_THD, k_UKD, v_UKD, *lists, **options)
        return out_THD


class _Gather(torch.autograd.Function):
    """The keys or values `[U, K, D]` of each row."""

    @staticmethod
    def forward(ctx: Any, x_TKD: Tensor, varlen: VarlenKeys) -> Tensor:
        ctx.varlen = varlen
        return x_TKD.index_select(0, varlen.keys)  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        varlen, grad_UKD = ctx.varlen, grads[0]
        total_TKD = grad_UKD.index_select(0, varlen.local)
        exact = torch.promote_types(grad_UKD.dtype, torch.float32)
        shared = total_TKD.index_select(0, varlen.shared).to(exact)
        for copies in varlen.rounds:
            shared[: len(copies)] += grad_UKD.index_select(0, copies)
        return total_TKD.index_copy_(0, varlen.shared, shared.to(grad_UKD.dtype)), None
