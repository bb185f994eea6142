"""Attention of one step of generation over the paged KV cache.

`varlen_attn` has the arguments of `torch.nn.attention.varlen.varlen_attn`: sequences of different lengths whose keys
lie in blocks of a pool. `BatchTensors` are a step's sequences on the device; `PagedAttention` writes their new keys and
values and attends, once a layer.

Legend: T tokens of the step, N sequences, B blocks of the longest one, P blocks of the cache of S tokens each, R tokens
and M keys that the torch code reads at a time, H query heads, K key/value heads, G = H / K, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl._host.device import is_host, to_device
from verl.attention import flash
from verl.errors import ModelError
from verl.rollout.embedded.kv_cache import KVCache, blocks_for
from verl.rollout.embedded.scheduler import ScheduledBatch

# Keys of a sequence that the torch code reads at a time, in whole blocks, and bytes of all that it reads at a time.
_KEYS = 256
_GATHER_BYTES = 64 << 20


class BatchTensors(NamedTuple):
    """A `ScheduledBatch` on the device, as the model and `varlen_attn` take it. T' tokens with padding.

    Rows of padding, if any, come last. Where the slots say T', padding has slots of its own, in a spare block.
    """

    tokens: Tensor  # [T'] int64
    positions: Tensor  # [T'] int64
    sampled_rows: Tensor  # [T'] int64
    slots: Tensor  # [T] or [T'] int64
    cu_seq_q: Tensor  # [N + 1] int32
    cu_seq_k: Tensor  # [N + 1] int32, sums of `seqused_k`
    seqused_k: Tensor  # [N] int32
    shared: Tensor  # [N] int32
    block_table: Tensor  # [N, B] int32
    max_q: int
    max_k: int

    @classmethod
    def of(cls, batch: ScheduledBatch, device: torch.device, rows: int | None = None) -> BatchTensors:
        """`rows`: the padded batch size, in tokens."""
        count = len(batch.tokens)
        # One array of what each token has and one of what each sequence has: two copies to the device.
        per_token = np.zeros((4, rows or count), np.int64)
        per_token[2, count:] = -1
        per_token[:, :count] = batch.tokens, batch.positions, batch.sampled_rows, batch.slots
        table = np.zeros((len(batch.blocks), max(map(len, batch.blocks))), np.int64)
        for row, blocks in enumerate(batch.blocks):
            table[row, : len(blocks)] = blocks
        lists: Any = ([0, *batch.ends], [0, *accumulate(batch.used)], batch.used, batch.shared, table.ravel())
        per_sequence = to_device(torch.from_numpy(np.concatenate(lists).astype(np.int32)), device)
        cu_seq_q, cu_seq_k, seqused_k, shared, block_table = per_sequence.split([*map(len, lists)])
        sequences = (cu_seq_q, cu_seq_k, seqused_k, shared, block_table.view(table.shape))
        tokens, positions, sampled_rows, slots = to_device(torch.from_numpy(per_token), device)
        max_q = max(end - begin for begin, end in pairwise(lists[0]))
        return cls(tokens, positions, sampled_rows, slots[:count], *sequences, max_q=max_q, max_k=max(batch.used))


def copy_blocks(cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy the contents of blocks, (from, to) each, of all layers."""
    if not pairs:
        return
    source, to = to_device(torch.tensor(pairs).T.contiguous(), cache.device)
    for pool in (cache.keys, cache.values):
        for layer in pool:
            layer.index_copy_(0, to, layer.index_select(0, source))


class PagedAttention(NamedTuple):
    """The `AttentionContext` of one step: writes the new keys and values, attends to the cache.

    Rows of padding are not read where they have no slots, and their result is zero. `rows`: the torch code computes
    every product for this many tokens, independent of the batch; kernels do not need it.
    """

    cache: KVCache
    tensors: BatchTensors
    rows: int | None = None

    def attend(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Raises: ModelError: keys, values or queries are not of the shape that the cache was made for."""
        heads, size = self.cache.heads, self.cache.head_dim
        shapes = [tuple(x.shape[1:]) for x in (q_THD, k_TKD, v_TKD)]
        if shapes[1:] != [(heads, size)] * 2 or q_THD.shape[2] != size or q_THD.shape[1] % heads:
            raise ModelError(
                f"layer {layer} gives its attention queries, keys and values of shapes {shapes}, the KV cache has "
                f"{heads} heads of size {size}: generate with the 'hf' rollout engine"
            )
        tensors, kernels = self.tensors, self.cache.kernels
        count = len(tensors.slots)
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        out_THD[count:] = 0
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if kernels is None:
            for pool, x in ((keys, k_TKD), (values, v_TKD)):
                pool.flatten(0, 1)[tensors.slots] = x[:count]
            out_THD[:count] = self._attend(q_THD[:count], keys, values, scale, window)
        else:
            inputs = (q_THD, k_TKD[:count], v_TKD[:count])
            q_THD, k_TKD, v_TKD = (x if x.stride(-1) == 1 else x.contiguous() for x in inputs)
            strides = (*k_TKD.stride()[:2], *v_TKD.stride()[:2])
            kernels.write(k_TKD, v_TKD, keys, values, tensors.slots, count, *strides, heads, size)
            lists = (tensors.cu_seq_q, tensors.seqused_k, tensors.block_table, tensors.shared)
            sizes = (*tensors.block_table.shape, *q_THD.stride()[:2], q_THD.shape[1], heads, size)
            kernels.varlen_attn(q_THD, out_THD, keys, values, *lists, *sizes, window or 0, scale)
        return out_THD

    def _attend(self, q_THD: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, scale: float, window: int | None) -> Tensor:
        """By flash attention where it is available, else by the torch code."""
        tensors, is_grouped = self.tensors, q_THD.shape[1] != self.cache.heads
        kernel = flash.flash_attention(v_PSKD, paged=True)
        if self.rows is not None and kernel is not None and not flash.takes_splits(kernel, k_PSKD):
            kernel = None
        window_size = (-1 if window is None else window - 1, 0)
        options: dict[str, int] = {}
        if kernel is None:
            options = {} if self.rows is None else {"rows": self.rows}
        elif is_grouped and window is None and tensors.max_q == 1 and self.rows is None:
            # One query sees all keys, causal or not, and only where it is not said to be do the query heads of a
            # group share each read. Steps whose numbers depend on nothing else in them take one kernel throughout.
            window_size = (-1, -1)
        elif flash.takes_splits(kernel, k_PSKD):
            options = {"num_splits": 1}  # else torch splits the keys, and writes most sequences to the wrong place
        lists = (tensors.cu_seq_q, tensors.cu_seq_k, tensors.max_q, tensors.max_k)
        pages: dict[str, Any] = {"seqused_k": tensors.seqused_k, "block_table": tensors.block_table, **options}
        return (kernel or varlen_attn)(
            q_THD, k_PSKD, v_PSKD, *lists, scale=scale, window_size=window_size, enable_gqa=is_grouped, **pages
        )


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
    window_size: tuple[int, int] = (-1, 0),
    enable_gqa: bool = False,
    seqused_k: Tensor,
    block_table: Tensor,
    rows: int | None = None,
) -> Tensor:
    """Causal attention of sequences over a pool of blocks, as `torch.nn.attention.varlen.varlen_attn`.

    Args:
        query: `[T, H, D]`, the last tokens of each sequence.
        key, value: the pool, `[P, S, K, D]`.
        cu_seq_q: `[N + 1]`, where the queries of each sequence begin and end.
        cu_seq_k: not read: `seqused_k` `[N]` says how many keys each sequence has.
        window_size: (w, 0): a token sees itself and the w before it; (-1, 0): all before it.
        block_table: `[N, B]`, the blocks of each sequence.
        rows: compute products for this many tokens at a time, so that a token's numbers do not depend on the others.

    Returns:
        `[T, H, D]` in the dtype of the queries; computed in fp32, or fp64 for fp64.
    """
    q_THD, k_PSKD, v_PSKD = query, key, value  # as torch calls them
    device, kv_heads, count = q_THD.device, k_PSKD.shape[2], len(q_THD)
    exact = torch.promote_types(q_THD.dtype, torch.float32)
    q_TKGD = (q_THD.to(exact) * (q_THD.shape[-1] ** -0.5 if scale is None else scale)).unflatten(1, (kv_heads, -1))
    lengths = cu_seq_q.diff()
    # The host knows how many there are: it need not wait for the lengths.
    sequence = torch.arange(len(lengths), device=device).repeat_interleave(lengths, output_size=count)
    position = (seqused_k - cu_seq_q[1:])[sequence] + torch.arange(count, device=device)
    most = rows or max(1, _GATHER_BYTES // (2 * _KEYS * k_PSKD[0, 0].numel() * exact.itemsize))
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    for start in range(0, count, most):
        part = slice(start, min(start + most, count))
        size = part.stop - start
        # Padded by the part's first token: blocks of others may never have been written.
        index = torch.arange(rows or size, device=device)
        index = start + index.masked_fill_(index >= size, 0)
        table = block_table[sequence[index]]
        mixed = _attend_rows(q_TKGD[index], k_PSKD, v_PSKD, table, position[index], window_size[0], max_k)
        out_THD[part] = mixed[:size].flatten(1, 2).to(q_THD.dtype)
    return out_THD


def _attend_rows(
    q_RKGD: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, table: Tensor, position: Tensor, past: int, max_k: int
) -> Tensor:
    """Attention of single tokens at `position` `[R]`, none beyond `max_k`, with blocks `table` `[R, B]`; softmax over
    runs of blocks."""
    peak_RKG = q_RKGD.new_full(q_RKGD.shape[:3], torch.finfo(q_RKGD.dtype).min)
    total_RKG, out_RKGD = torch.zeros_like(peak_RKG), torch.zeros_like(q_RKGD)
    size = k_PSKD.shape[1]
    run = max(1, _KEYS // size)
    longest = int(position.max()) + 1 if is_host(position.device) else max_k
    for first in range(0, blocks_for(longest, size), run):
        chosen = table[:, first : first + run]
        chosen = torch.nn.functional.pad(chosen, (0, run - chosen.shape[1]))
        k_RKMD, v_RKMD = (x[chosen].flatten(1, 2).to(q_RKGD.dtype).transpose(1, 2) for x in (k_PSKD, v_PSKD))
        key_positions = first * size + torch.arange(run * size, device=q_RKGD.device)
        seen = key_positions <= position[:, None]
        if past >= 0:
            seen &= key_positions >= position[:, None] - past
        # What a token does not see may hold anything, and 0 x NaN is NaN.
        hidden = ~seen[:, None, :, None]
        scores_RKGM = (q_RKGD @ k_RKMD.masked_fill(hidden, 0).mT).masked_fill(hidden.mT, -torch.inf)
        new_peak = torch.maximum(peak_RKG, scores_RKGM.amax(-1))
        weights_RKGM, kept_RKG = (scores_RKGM - new_peak[..., None]).exp(), (peak_RKG - new_peak).exp()
        total_RKG = total_RKG * kept_RKG + weights_RKGM.sum(-1)
        out_RKGD = out_RKGD * kept_RKG[..., None] + weights_RKGM @ v_RKMD.masked_fill(hidden, 0)
        peak_RKG = new_peak
    return out_RKGD / total_RKG[..., None]
