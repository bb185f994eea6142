"""Attention of one step of generation over the paged KV cache.

`varlen_attn` has the arguments of `torch.nn.attention.varlen.varlen_attn`: sequences of different lengths whose keys
lie in blocks of a pool. `ScheduledBatch` collects the sequences of a step; `PagedAttention` writes their new keys and
values and attends, once a layer.

Legend: T tokens of the step, N sequences, B blocks of the longest one, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from verl.attention import varlen
from verl.device import is_host, to_device
from verl.errors import ModelError
from verl.rollout.embedded.kv_cache import BLOCK, KVCache, blocks_for

# Keys of a sequence that the torch code reads at a time, in whole blocks, and bytes of all that it reads at a time.
_KEYS = 256
_GATHER_BYTES = 64 << 20


class ScheduledBatch:
    """The sequences of a step: the new tokens of each, its blocks of `block` tokens, and how many may be shared."""

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.ends: list[int] = []  # of each sequence's tokens
        self.used: list[int] = []  # tokens in the cache, the new ones included
        self.blocks: list[list[int]] = []
        self.shared: list[int] = []

    def add(self, tokens: Sequence[int], start: int, blocks: Sequence[int], shared: int) -> int:
        """Add new tokens of a sequence, at positions `start, start + 1, ...`. Returns the flat index of the last one.

        Args:
            blocks: the sequence's blocks, up to these tokens at least.
            shared: how many of the first blocks may be shared with neighbouring sequences. The result of a sequence
                depends on this number, but not on whether others do share them.
        """
        used = start + len(tokens)
        self.tokens.extend(tokens)
        self.positions.extend(range(start, used))
        self.ends.append(len(self.tokens))
        self.used.append(used)
        self.blocks.append(list(blocks[: blocks_for(used, self.block)]))
        self.shared.append(min(shared, len(self.blocks[-1])))
        return len(self.tokens) - 1

    @property
    def decodes(self) -> bool:
        """Whether it is one token of each sequence."""
        return len(self.tokens) == len(self.ends)

    def slots(self) -> list[int]:
        """Where the keys and values of each token go: block times its size plus row."""
        return [
            blocks[position // self.block] * self.block + position % self.block
            for begin, end, blocks in zip([0, *self.ends], self.ends, self.blocks, strict=False)
            for position in self.positions[begin:end]
        ]

    def numbers(self) -> list[int]:
        """The plan as whole numbers, which `of_numbers` reads."""
        found, begin = [len(self.ends)], 0
        for end, used, blocks, shared in zip(self.ends, self.used, self.blocks, self.shared, strict=True):
            found += [end - begin, used - (end - begin), shared, len(blocks), *blocks, *self.tokens[begin:end]]
            begin = end
        return found

    @classmethod
    def of_numbers(cls, numbers: Sequence[int], block: int) -> tuple[ScheduledBatch, Sequence[int]]:
        """The plan, and what follows it."""
        plan, at = cls(block), 1
        for _ in range(numbers[0]):
            count, start, shared, blocks = numbers[at : at + 4]
            middle, end = at + 4 + blocks, at + 4 + blocks + count
            plan.add(numbers[middle:end], start, numbers[at + 4 : middle], shared)
            at = end
        return plan, numbers[at:]

    def split(self, size: int) -> list[ScheduledBatch]:
        """The same tokens as plans of at most `size`, to be computed in this order."""
        parts: list[ScheduledBatch] = []
        begin = 0
        for end, used, blocks, shared in zip(self.ends, self.used, self.blocks, self.shared, strict=True):
            while begin < end:
                if not parts or len(parts[-1].tokens) == size:
                    parts.append(ScheduledBatch(self.block))
                count = min(end - begin, size - len(parts[-1].tokens))
                parts[-1].add(self.tokens[begin : begin + count], used - (end - begin), blocks, shared)
                begin += count
        return parts


@dataclass(frozen=True)
class Tables:
    """A plan as `varlen_attn` takes it, and where the new keys go."""

    cu_seq_q: Tensor  # [N + 1] int32
    cu_seq_k: Tensor  # [N + 1] int32, sums of `seqused_k`
    seqused_k: Tensor  # [N] int32
    block_table: Tensor  # [N, B] int32
    shared: Tensor  # [N] int32
    slots: Tensor  # [T] int64
    max_q: int
    max_k: int

    @classmethod
    def of(cls, plan: ScheduledBatch, device: torch.device) -> Tables:
        def ints(values: list[int] | list[list[int]], dtype: torch.dtype = torch.int32) -> Tensor:
            return to_device(torch.tensor(values, dtype=dtype), device)

        longest = max(map(len, plan.blocks))
        begins = [0, *plan.ends]
        return cls(
            cu_seq_q=ints(begins),
            cu_seq_k=ints([0, *accumulate(plan.used)]),
            seqused_k=ints(plan.used),
            block_table=ints([[*blocks, *[0] * (longest - len(blocks))] for blocks in plan.blocks]),
            shared=ints(plan.shared),
            slots=ints(plan.slots(), torch.int64),
            max_q=max(end - begin for begin, end in zip(begins, plan.ends, strict=False)),
            max_k=max(plan.used),
        )


class PagedAttention:
    """The `AttentionContext` of one step: writes the new keys and values, attends to the cache.

    Rows beyond the plan's tokens are padding: they are not read, and their result is zero. `rows`: the torch code
    computes every product for this many tokens, independent of the plan; kernels do not need it.
    """

    def __init__(self, cache: KVCache, plan: ScheduledBatch | Tables, rows: int | None = None) -> None:
        self.cache = cache
        self._rows = rows
        self._tables = Tables.of(plan, cache.device) if isinstance(plan, ScheduledBatch) else plan
        self._tokens = len(self._tables.slots)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """Raises: ModelError: keys, values or queries are not of the shape that the cache was made for."""
        heads, size = self.cache.heads, self.cache.head_dim
        given = [tuple(x.shape[1:]) for x in (query, key, value)]
        if given[1:] != [(heads, size)] * 2 or query.shape[2] != size or query.shape[1] % heads:
            raise ModelError(
                f"layer {layer} gives its attention queries, keys and values of shapes {given}, the KV cache has "
                f"{heads} heads of size {size}: generate with the 'hf' rollout engine"
            )
        tables, count = self._tables, self._tokens
        self.cache.write(layer, key[:count], value[:count], tables.slots)
        out = torch.empty_like(query, memory_format=_DENSE)
        out[count:] = 0
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        compiled = self.cache.kernels
        if compiled is not None:
            query = query if query.stride(-1) == 1 else query.contiguous()
            lists = (tables.cu_seq_q, tables.seqused_k, tables.block_table, tables.shared)
            compiled.varlen_attn(query, keys, values, out, *lists, window or 0, scale, heads)
        else:
            flash = varlen.flash_attention(values, paged=True)
            if self._rows is not None and flash is not None and not varlen.has_splits(flash):
                flash = None
            is_grouped = query.shape[1] != heads
            window_size = (-1 if window is None else window - 1, 0)
            options: dict[str, int] = {}
            if flash is None:
                options = {} if self._rows is None else {"rows": self._rows}
            elif is_grouped and window is None and tables.max_q == 1 and self._rows is None:
                # One query sees all keys, causal or not, and only where it is not said to be do the query heads of a
                # group share each read. Steps whose numbers depend on nothing else in them take one kernel throughout.
                window_size = (-1, -1)
            elif varlen.has_splits(flash):
                options = {"num_splits": 1}  # else torch splits the keys, and writes most sequences to the wrong place
            out[:count] = (flash or varlen_attn)(
                query[:count],
                keys,
                values,
                tables.cu_seq_q,
                tables.cu_seq_k,
                tables.max_q,
                tables.max_k,
                scale=scale,
                window_size=window_size,
                enable_gqa=is_grouped,
                seqused_k=tables.seqused_k,
                block_table=tables.block_table,
                **options,
            )
        return out


_DENSE = torch.contiguous_format


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
        key, value: the pool, `[blocks, tokens of a block, K, D]`.
        cu_seq_q: `[N + 1]`, where the queries of each sequence begin and end.
        cu_seq_k: not read: `seqused_k` `[N]` says how many keys each sequence has.
        window_size: (w, 0): a token sees itself and the w before it; (-1, 0): all before it.
        block_table: `[N, B]`, the blocks of each sequence.
        rows: compute products for so many tokens at a time, so that a token's numbers do not depend on the others.

    Returns:
        `[T, H, D]` in the dtype of the queries; computed in fp32, or fp64 for fp64.
    """
    device, kv_heads = query.device, key.shape[2]
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    q = (query.to(exact) * (query.shape[-1] ** -0.5 if scale is None else scale)).unflatten(1, (kv_heads, -1))
    lengths = cu_seq_q.diff()
    # The host knows how many there are: it need not wait for the lengths.
    sequence = torch.arange(len(lengths), device=device).repeat_interleave(lengths, output_size=len(query))
    position = (seqused_k - cu_seq_q[1:])[sequence] + torch.arange(len(query), device=device)
    most = rows or max(1, _GATHER_BYTES // (2 * _KEYS * key[0, 0].numel() * exact.itemsize))
    out = torch.empty_like(query, memory_format=_DENSE)
    for start in range(0, len(query), most):
        part = slice(start, min(start + most, len(query)))
        count = part.stop - start
        # Filled up with the part's first token: blocks of others may never have been written.
        index = torch.arange(rows or count, device=device)
        index = start + index.masked_fill_(index >= count, 0)
        table = block_table[sequence[index]]
        mixed = _attend_rows(q[index], key, value, table, position[index], window_size[0], max_k)
        out[part] = mixed[:count].flatten(1, 2).to(query.dtype)
    return out


def _attend_rows(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, position: Tensor, past: int, max_k: int
) -> Tensor:
    """Of single tokens `[R, K, G, D]` at `position` `[R]`, none beyond `max_k`, with blocks `table` `[R, B]`; softmax
    over runs of blocks."""
    peak = query.new_full(query.shape[:3], torch.finfo(query.dtype).min)
    total, out = torch.zeros_like(peak), torch.zeros_like(query)
    size = key.shape[1]
    run = max(1, _KEYS // size)
    longest = int(position.max()) + 1 if is_host(position.device) else max_k
    for first in range(0, blocks_for(longest, size), run):
        chosen = table[:, first : first + run]
        chosen = torch.nn.functional.pad(chosen, (0, run - chosen.shape[1]))
        k, v = (pool[chosen].flatten(1, 2).to(query.dtype).transpose(1, 2) for pool in (key, value))  # [R, K, keys, D]
        at = first * size + torch.arange(run * size, device=query.device)
        seen = at <= position[:, None]
        if past >= 0:
            seen &= at >= position[:, None] - past
        # What a token does not see may hold anything, and 0 x NaN is NaN.
        hidden = ~seen[:, None, :, None]
        scores = (query @ k.masked_fill(hidden, 0).mT).masked_fill(hidden.mT, -torch.inf)
        new_peak = torch.maximum(peak, scores.amax(-1))
        weights, kept = (scores - new_peak[..., None]).exp(), (peak - new_peak).exp()
        total = total * kept + weights.sum(-1)
        out = out * kept[..., None] + weights @ v.masked_fill(hidden, 0)
        peak = new_peak
    return out / total[..., None]
