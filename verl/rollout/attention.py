"""Attention of one step of generation: which keys each token sees (`Plan`), and computing it (`PagedAttention`).

A tile is a run of tokens that see the same prompt blocks: samples of one prompt, or neighbours in a prompt being
read. A token sees the keys of its tile's prompt blocks, then those of its own blocks: the key at index i of its own
blocks stands at position `prefix + i`. The plan is made once a step and serves every layer.

Legend: T tokens of the step, H query heads, K key/value heads, G = H / K, D head size, S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from verl.errors import ModelError
from verl.models.compiled import kernels
from verl.rollout.kv_cache import BLOCK, KVCache, blocks_for

# Query rows of a tile that share a key/value head: enough to use a block well, few enough to divide the work.
_TILE_ROWS = 32
# The torch code gathers keys and values; of this many bytes at a time.
_GATHER_BYTES = 64 << 20
# Blocks of a run of keys where all operations have one shape.
_RUN = 8
_NO_PREFIX = 2**31 - 1


class Plan:
    """The flat tokens of a step and what they see."""

    def __init__(self, group: int) -> None:
        self.group = group
        self.tile_tokens = max(1, _TILE_ROWS // group)
        self._last_prompt: Sequence[int] | None = None
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.prefix: list[int] = []
        self.slots: list[int] = []
        self.own_begin: list[int] = []
        self.own_count: list[int] = []
        self.tile_start: list[int] = []
        self.shared_begin: list[int] = []
        self.shared_count: list[int] = []
        self.blocks: list[int] = []

    def add_prompt(self, tokens: Sequence[int], start: int, blocks: Sequence[int]) -> int:
        """Prompt tokens `start, start + 1, ...`, kept in the prompt's `blocks`; the last one's flat index."""
        begin = len(self.blocks)
        self.blocks.extend(blocks[: blocks_for(start + len(tokens))])
        for offset, token in enumerate(tokens):
            position = start + offset
            if offset % self.tile_tokens == 0:
                self._tile(begin, blocks_for(min(start + len(tokens), position + self.tile_tokens)))
            self._token(token, position, _NO_PREFIX, blocks, position, -1, 0)
        self._last_prompt = None
        return len(self.tokens) - 1

    def add_own(
        self, tokens: Sequence[int], start: int, prefix: int, prompt: Sequence[int], blocks: Sequence[int]
    ) -> int:
        """Tokens `start, ...` of a response after a prompt of `prefix` tokens in blocks `prompt`, kept in `blocks`."""
        if prompt is not self._last_prompt:
            self._last_prompt = prompt
            self._prompt_begin = len(self.blocks)
            self.blocks.extend(prompt)
            self._room = 0
        begin = len(self.blocks)
        self.blocks.extend(blocks[: blocks_for(start + len(tokens))])
        for offset, token in enumerate(tokens):
            if self._room == 0:
                self._tile(self._prompt_begin, len(prompt))
                self._room = self.tile_tokens
            self._room -= 1
            index = start + offset
            self._token(token, prefix + index, prefix, blocks, index, begin, blocks_for(index + 1))
        return len(self.tokens) - 1

    def split(self, size: int) -> list[Plan]:
        """The same tokens as plans of at most `size`, to be computed in this order."""
        ends = [*self.tile_start[1:], len(self.tokens)]
        parts = []
        for begin in range(0, len(self.tokens), size):
            part, end = Plan(self.group), begin + size
            for name in ("tokens", "positions", "prefix", "slots", "own_begin", "own_count"):
                setattr(part, name, getattr(self, name)[begin:end])
            tiles = [i for i, start in enumerate(self.tile_start) if start < end and ends[i] > begin]
            part.tile_start = [max(self.tile_start[i], begin) - begin for i in tiles]
            part.shared_begin = [self.shared_begin[i] for i in tiles]
            part.shared_count = [self.shared_count[i] for i in tiles]
            part.blocks = self.blocks
            parts.append(part)
        return parts

    def _tile(self, begin: int, count: int) -> None:
        self.tile_start.append(len(self.tokens))
        self.shared_begin.append(begin)
        self.shared_count.append(count)

    def _token(
        self, token: int, position: int, prefix: int, blocks: Sequence[int], index: int, own_begin: int, own_count: int
    ) -> None:
        self.tokens.append(token)
        self.positions.append(position)
        self.prefix.append(prefix)
        self.slots.append(blocks[index // BLOCK] * BLOCK + index % BLOCK)
        self.own_begin.append(own_begin)
        self.own_count.append(own_count)


class PagedAttention:
    """The `AttentionContext` of one step: writes the new keys and values, attends to the cache.

    Of what it is given, rows beyond the plan's tokens are padding: they are not looked at, their result is zero.
    `compiled=False` keeps to torch code (the reference, and the way of every device but the CPU). `tiles`: torch
    operations all have the shape for this many tiles, whatever the plan; the compiled ones need no such care.
    """

    def __init__(self, cache: KVCache, plan: Plan, compiled: bool = True, tiles: int | None = None) -> None:
        self.cache = cache
        self._tokens = len(plan.tokens)
        self._group = plan.group
        device, dtype = cache.values.device, cache.values.dtype
        self._kernels = kernels(dtype, device) if compiled else None
        self._attend: Callable[[int, Tensor, Tensor, Tensor, float, int | None], Tensor]
        if self._kernels is not None:
            self._arrays = _arrays(plan)
            self._attend = self._attend_compiled
        else:
            self._slots = torch.tensor(plan.slots, device=device)
            self._pieces = _pieces(plan, cache) if tiles is None else _fixed_pieces(plan, cache, tiles)
            self._attend = self._attend_torch

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """Raises: ModelError: keys, values or queries are not of the shape that the cache was made for."""
        heads, size = self.cache.heads, self.cache.head_dim
        given = [tuple(x.shape[1:]) for x in (query, key, value)]
        if given != [(heads * self._group, size), (heads, size), (heads, size)]:
            raise ModelError(
                f"layer {layer} gives its attention queries, keys and values of shapes {given}, the KV cache has "
                f"{heads} heads of size {size}: generate with the 'hf' rollout engine"
            )
        return self._attend(layer, query, key, value, scale, window)

    def _attend_compiled(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        assert self._kernels is not None
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        out = torch.empty(query.shape, dtype=query.dtype)
        if out.shape[0] > self._tokens:
            out[self._tokens :] = 0
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        self._kernels.attend(self._arrays, query, key, value, out, keys, values, window or 0, scale)
        return out

    def _attend_torch(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        block, place = self._slots // BLOCK, self._slots % BLOCK
        size, pair = query.shape[-1], values.shape[-1]
        keys[block, :, :, place] = pad(key[: self._tokens], (0, -size % pair)).unflatten(-1, (-1, pair))
        values[block, :, place // pair, :size, place % pair] = value[: self._tokens]
        accumulate = torch.float64 if query.dtype == torch.float64 else torch.float32
        tokens, heads, _ = query.shape
        query = (query.to(accumulate) * scale).unflatten(1, (key.shape[1], -1))
        total = query.new_zeros(tokens, heads)
        total[self._tokens :] = 1
        peak = query.new_full((tokens, heads), torch.finfo(accumulate).min)
        out = query.new_zeros(tokens, heads, size)
        for piece in self._pieces:
            _attend_piece(piece, query, keys, values, window, out, total, peak)
        return (out / total[..., None]).to(key.dtype)


@dataclass(frozen=True)
class _Piece:
    """Some tiles (n of R tokens at most) and their keys; `index` `[n, R]`, `real` `[n, R]`, `table` `[n, blocks]`."""

    index: Tensor
    real: Tensor
    table: Tensor
    first_key: Tensor
    last_key: Tensor
    positions: Tensor


@dataclass(frozen=True)
class _Part:
    """Tokens that see the same keys: those of `table`, from position `first` on, which end where `own` ones begin."""

    tokens: range
    table: list[int]
    first: int
    own: bool


def _parts(plan: Plan) -> tuple[list[_Part], list[_Part]]:
    """The prompt part of all tiles and the own part of all tokens."""
    ends = [*plan.tile_start[1:], len(plan.tokens)]
    tiles = zip(plan.tile_start, ends, plan.shared_begin, plan.shared_count, strict=True)
    own = enumerate(zip(plan.own_begin, plan.own_count, strict=True))
    return (
        [_Part(range(start, end), plan.blocks[begin : begin + count], 0, False) for start, end, begin, count in tiles],
        [
            _Part(range(t, t + 1), plan.blocks[begin : begin + count], plan.prefix[t], True)
            for t, (begin, count) in own
            if begin >= 0
        ],
    )


def _pieces(plan: Plan, cache: KVCache) -> list[_Piece]:
    """All parts, cut so that what is gathered stays small."""
    width = cache.values[0, 0].numel() * 4
    pieces = []
    for parts in _parts(plan):
        parts.sort(key=lambda part: len(part.table))
        start = 0
        while start < len(parts):
            end = start + 1
            while end < len(parts) and (end + 1 - start) * len(parts[end].table) * width <= _GATHER_BYTES:
                end += 1
            chosen = parts[start:end]
            rows, blocks = max(len(part.tokens) for part in chosen), len(chosen[-1].table)
            pieces.append(_piece(plan, chosen, rows, blocks, cache.values.device))
            start = end
    return pieces


def _fixed_pieces(plan: Plan, cache: KVCache, tiles: int) -> list[_Piece]:
    """All parts in pieces of one shape, keys in runs that begin at multiples of their length."""
    pieces = []
    for parts, rows in zip(_parts(plan), (plan.tile_tokens, 1), strict=True):
        runs = [
            (start, _Part(part.tokens, part.table[start : start + _RUN], part.first + start * BLOCK, part.own))
            for part in parts
            for start in range(0, len(part.table), _RUN)
        ]
        for start in sorted({start for start, _ in runs}):
            at = [part for begin, part in runs if begin == start]
            for i in range(0, len(at), tiles):
                chosen = at[i : i + tiles]
                padding = [_Part(range(0), [], 0, False)] * (tiles - len(chosen))
                pieces.append(_piece(plan, [*chosen, *padding], rows, _RUN, cache.values.device))
    return pieces


def _piece(plan: Plan, parts: list[_Part], rows: int, blocks: int, device: torch.device) -> _Piece:
    """These parts with `rows` tokens and `blocks` blocks each; what they lack is filled up and not `real`."""
    # Filling repeats a part's first token: another would look at other keys, which may not be there.
    index = [[*part.tokens, *[part.tokens.start] * (rows - len(part.tokens))] for part in parts]
    positions = torch.tensor([[plan.positions[t] for t in row] for row in index], device=device)
    prefix = torch.tensor([[plan.prefix[t] for t in row] for row in index], device=device)
    own = torch.tensor([part.own for part in parts], device=device)[:, None]
    first = torch.tensor([part.first for part in parts], device=device)[:, None]
    # A token's prompt part ends before its prefix, both parts at itself and at the last of their blocks.
    held = first + torch.tensor([len(part.table) * BLOCK for part in parts], device=device)[:, None]
    last = torch.where(own, positions, torch.minimum(positions, prefix - 1))
    return _Piece(
        index=torch.tensor(index, device=device),
        real=torch.tensor([[i < len(part.tokens) for i in range(rows)] for part in parts], device=device),
        table=torch.tensor([[*part.table, *[0] * (blocks - len(part.table))] for part in parts], device=device),
        first_key=first,
        last_key=torch.minimum(last, held - 1),
        positions=positions,
    )


def _attend_piece(
    piece: _Piece,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int | None,
    out: Tensor,
    total: Tensor,
    peak: Tensor,
) -> None:
    """Go on with the softmax of this piece's tokens: `out` `[T, H, D]`, `total` and `peak` `[T, H]` are updated."""
    n, blocks = piece.table.shape
    k, v = (cached[piece.table.flatten()].unflatten(0, (n, blocks)).to(query.dtype) for cached in (keys, values))
    k = k.permute(0, 2, 3, 5, 1, 4).flatten(4).flatten(2, 3)[:, :, : query.shape[-1]]
    v = v.permute(0, 2, 1, 3, 5, 4).flatten(2, 4)[..., : query.shape[-1]]
    q = query[piece.index].permute(0, 2, 1, 3, 4)
    at = piece.first_key[..., None] + torch.arange(blocks * BLOCK, device=q.device)
    seen = at <= piece.last_key[..., None]
    if window is not None:
        seen &= at > piece.positions[..., None] - window
    scores = (q.flatten(2, 3) @ k).unflatten(2, q.shape[2:4])
    scores = scores.masked_fill(~seen[:, None, :, None], -torch.inf)
    top = scores.amax(-1).clamp(min=torch.finfo(q.dtype).min)
    weights = (scores - top[..., None]).exp()
    # Where no token looks the cache may hold anything, and 0 x NaN is NaN.
    v = v.masked_fill(~seen.any(1)[:, None, :, None], 0)
    mixed = (weights.flatten(2, 3) @ v).unflatten(2, q.shape[2:4])
    tokens = piece.index[piece.real]
    new_top, new_total, new_out = (x.transpose(1, 2)[piece.real].flatten(1, 2) for x in (top, weights.sum(-1), mixed))
    peak_after = torch.maximum(peak[tokens], new_top)
    before, now = (peak[tokens] - peak_after).exp(), (new_top - peak_after).exp()
    total[tokens] = total[tokens] * before + new_total * now
    out[tokens] = out[tokens] * before[..., None] + new_out * now[..., None]
    peak[tokens] = peak_after


def _arrays(plan: Plan) -> dict[str, Tensor]:
    """The plan as the compiled kernel reads it."""
    lists = {name: getattr(plan, name) for name in ("positions", "prefix", "slots", "own_begin", "blocks")}
    lists["tile_start"] = [*plan.tile_start, len(plan.tokens)]
    lists["shared_begin"] = plan.shared_begin
    return {name: torch.tensor(values, dtype=torch.int32) for name, values in lists.items()}
