"""A stand-in for `torch.nn.attention.varlen.varlen_attn`, which has no CPU kernel: its arguments, plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Sequence by sequence; the last query sees the last key, as in flash attention."""
    assert window_size[1] == 0, "causal attention alone"
    assert enable_gqa or query.shape[1] == key.shape[-2]
    assert cu_seq_q.dtype == torch.int32
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out, lengths_q, lengths_k = [], cu_seq_q.diff().tolist(), []
    for n in range(len(cu_seq_q) - 1):
        q = query[cu_seq_q[n] : cu_seq_q[n + 1]]
        if block_table is not None:
            assert seqused_k is not None and block_table.dtype == seqused_k.dtype == torch.int32
            k, v = (pool[block_table[n].long()].flatten(0, 1)[: seqused_k[n]] for pool in (key, value))
        else:
            assert cu_seq_k is not None and cu_seq_k.dtype == torch.int32
            k, v = (x[cu_seq_k[n] : cu_seq_k[n + 1]] for x in (key, value))
        lengths_k.append(len(k))
        at = torch.arange(len(q))[:, None] + len(k) - len(q)
        seen = torch.arange(len(k)) <= at
        if window_size[0] >= 0:
            seen &= torch.arange(len(k)) >= at - window_size[0]
        groups = query.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -torch.inf)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    assert max_q == max(lengths_q)
    if block_table is not None and max_q == 1:  # a recorded decode step has a bound that holds for all its calls
        assert max(lengths_k) <= max_k <= block_table.shape[1] * key.shape[1]
    else:
        assert max_k == max(lengths_k)
    return torch.cat(out)
