"""A stand-in for `torch.nn.attention.varlen.varlen_attn`, which has no CPU kernel: its arguments, plain torch.

It demands what the real one checks, and where that one gives wrong numbers so does this one: a paged call whose keys
are split, or that leaves it to torch whether they are, gives NaN unless the query heads of each group are folded
together.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAGE = 256  # tokens of a page are a multiple of this


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    page: int = PAGE,
) -> Tensor:
    """Sequence by sequence; the last query sees the last key, as in flash attention.

    Args:
        page: of short sequences tests may have several pages all the same.
    """
    heads, kv_heads = query.shape[1], key.shape[-2]
    check(query, key, value, cu_seq_q, cu_seq_k, seqused_k, block_table, page)
    assert enable_gqa or heads == kv_heads
    folded = max_q == 1 and heads > kv_heads and window_size == (-1, -1)
    assert window_size[1] == 0 or folded, "causal attention alone, but for single queries whose heads are folded"
    if folded:
        assert len(query) == len(cu_seq_q) - 1, "a query of each sequence"
    if block_table is not None and num_splits != 1 and not folded:
        return torch.full_like(query, torch.nan)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out, lengths_q, lengths_k = [], cu_seq_q.diff().tolist(), []
    for n in range(len(cu_seq_q) - 1):
        q = query[cu_seq_q[n] : cu_seq_q[n + 1]]
        if block_table is not None:
            assert seqused_k is not None
            k, v = (pool[block_table[n].long()].flatten(0, 1)[: seqused_k[n]] for pool in (key, value))
        else:
            k, v = (x[cu_seq_k[n] : cu_seq_k[n + 1]] for x in (key, value))
        lengths_k.append(len(k))
        at = torch.arange(len(q))[:, None] + len(k) - len(q)
        seen = torch.arange(len(k)) <= at
        if window_size[0] >= 0:
            seen &= torch.arange(len(k)) >= at - window_size[0]
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -torch.inf)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    assert max_q == max(lengths_q)
    if block_table is not None and max_q == 1:  # a recorded decode step has a bound that holds for all its calls
        assert max(lengths_k) <= max_k <= block_table.shape[1] * key.shape[1]
    else:
        assert max_k == max(lengths_k)
    return torch.cat(out)


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    page: int,
) -> None:
    """What the operator under the real one checks, dtypes aside: tests compare in fp64."""
    count, size = len(cu_seq_q) - 1, query.shape[-1]
    assert count > 0 and size % 8 == 0 and size <= 256
    assert query.shape[1] % key.shape[-2] == 0
    assert query.dtype == key.dtype == value.dtype
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    for lengths in (cu_seq_q, cu_seq_k):
        assert lengths is not None and lengths.shape == (count + 1,)
        assert lengths.dtype == torch.int32 and lengths.is_contiguous()
    if seqused_k is not None:
        assert seqused_k.dtype == torch.int32 and seqused_k.is_contiguous() and seqused_k.shape == (count,)
    if block_table is None:
        assert key.shape == value.shape == (len(key), key.shape[1], size)
        return
    assert seqused_k is not None and not (query.requires_grad and torch.is_grad_enabled()), "for generation alone"
    assert key.shape == value.shape == (*key.shape[:3], size)
    assert key.shape[1] % page == 0, f"pages of {key.shape[1]} tokens, not of a multiple of {page}"
    assert block_table.dtype == torch.int32 and block_table.stride(-1) == 1 and block_table.shape[0] == count
