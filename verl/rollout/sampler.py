"""Sampling a token from each row of logits by inverse CDF, in two levels.

Given its uniform u a row's token is fixed: the first in vocabulary order whose cumulative weight passes
u x total. The weights are summed over blocks of the vocabulary; the block is found among the block sums, the
token within its block. So one pass over the logits serves the choice and the log-prob, and nothing of
the size of the logits is sorted, scanned or allocated.

On CPU a kernel does it; the torch code here is its reference, and serves other devices.

Legend: N rows, V vocabulary, B = ceil(V / BLOCK) blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.device import to_device
from verl.models.compiled import kernels
from verl.rollout.base import SamplingParams

BLOCK = 256
# Rows are worked on in pieces of about this size, which stay in the cache between the passes.
_PIECE_BYTES = 4 << 20
# Top-p looks at this many largest weights before it sorts a whole row.
_CANDIDATES = 1024


@dataclass(frozen=True)
class SamplingTable:
    """The parameters of N rows; as tensors `[N]`, fp64 or int64, too. `inverse_temperature` 0 is greedy.

    What is to be done follows from `params`: a question to the tensors would wait for the device.
    """

    params: Sequence[SamplingParams]
    inverse_temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    edits: Mapping[int, Callable[[Tensor], Tensor]]

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        edits: Mapping[int, Callable[[Tensor], Tensor]] | None = None,
        device: torch.device | str = "cpu",
    ) -> SamplingTable:
        """`edits[row]` returns the logits `[V]` to sample the row from, given its own, which it may overwrite."""
        device = torch.device(device)

        def numbers(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
            return to_device(torch.tensor(values, dtype=dtype), device)

        return cls(
            params=params,
            inverse_temperature=numbers([1 / p.temperature if p.temperature else 0.0 for p in params], torch.float64),
            top_k=numbers([p.top_k for p in params], torch.int64),
            top_p=numbers([p.top_p for p in params], torch.float64),
            min_p=numbers([p.min_p for p in params], torch.float64),
            edits=edits or {},
        )

    def rows(self, index: list[int]) -> SamplingTable:
        """Some of the rows, not edited."""
        return SamplingTable(
            [self.params[row] for row in index],
            self.inverse_temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            {},
        )


def sample(logits: Tensor, uniforms: Tensor, table: SamplingTable, compiled: bool = True) -> tuple[Tensor, Tensor]:
    """One token a row, and its log-prob under the temperature-scaled full distribution.

    Args:
        logits: `[N, V]`; computed in fp64 if they are fp64, else in fp32. May be overwritten.
        uniforms: `[N]` fp64 in [0, 1).
        table: parameters of the N rows.
        compiled: on CPU use the compiled kernel where it can be built.

    Returns:
        Tokens `[N]` int64, and log-probs `[N]` fp64 of the logits before any edit: NaN where a row's logits are
        not finite, or its edit makes one NaN or plus infinity; minus infinity where its edit leaves no token.

    Deviation: where weights tie at the boundary of top-k or top-p all of them are kept, so that the outcome
    does not depend on an order of sorting.
    """
    rows = list(table.edits)
    if not rows:
        return _sample(logits, uniforms, table, compiled)
    full = logits[rows].to(_accumulate(logits.dtype))
    edited = torch.stack([table.edits[row](own.clone()) for row, own in zip(rows, full, strict=True)]).to(full)
    top = edited.amax(-1)
    tokens, log_probs = _sample(logits, uniforms, table, compiled)
    special = table.rows(rows)
    chosen, _ = _sample(edited, uniforms[rows], special, compiled)
    # What an edit rules out belongs to the distribution that the log-prob is of.
    inverse = special.inverse_temperature.masked_fill(special.inverse_temperature == 0, 1.0)
    both = full.gather(1, torch.stack([chosen, tokens[rows]], 1)).double()
    chosen_log_probs = log_probs[rows] + (both[:, 0] - both[:, 1]) * inverse
    chosen_log_probs[top == -torch.inf] = -torch.inf
    chosen_log_probs[~(top < torch.inf)] = torch.nan
    tokens[rows], log_probs[rows] = chosen, chosen_log_probs
    return tokens, log_probs


def _accumulate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _sample(logits: Tensor, uniforms: Tensor, table: SamplingTable, compiled: bool) -> tuple[Tensor, Tensor]:
    """`sample` without regard to edits."""
    kernel = kernels(logits.dtype, logits.device) if compiled else None
    if kernel is None:
        return _sample_torch(logits.to(_accumulate(logits.dtype)), uniforms, table)
    parameters = (table.inverse_temperature, table.top_k, table.top_p, table.min_p)
    return kernel.sample(logits, uniforms, *parameters)


def _sample_torch(logits: Tensor, uniforms: Tensor, table: SamplingTable) -> tuple[Tensor, Tensor]:
    """The same in torch operations; fp32 or fp64 logits are overwritten."""
    greedy = table.inverse_temperature == 0
    weights, sums, best = _weights(logits, torch.where(greedy, 1.0, table.inverse_temperature), table.params)
    log_total = sums.double().sum(-1).log()
    filtered = [row for row, p in enumerate(table.params) if p.temperature and (p.top_k or p.top_p < 1 or p.min_p)]
    if filtered:
        _filter(weights, sums, table, filtered)
    tokens = torch.where(greedy, best, _inverse_cdf(weights, sums, uniforms))
    log_probs = weights.gather(1, tokens[:, None])[:, 0].double().log() - log_total
    return tokens, log_probs


def _weights(logits: Tensor, inverse: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor, Tensor]:
    """exp((x - max) / T) `[N, V]`, which overwrites the logits; its block sums `[N, B]`; greedy choices `[N]`."""
    rows, vocab = logits.shape
    sums = logits.new_empty(rows, -(-vocab // BLOCK))
    best = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    greedy = not all(p.temperature for p in params)
    scaled = any((p.temperature or 1) != 1 for p in params)
    inverse = inverse.to(logits.dtype)[:, None]
    piece = max(1, _PIECE_BYTES // (vocab * logits.element_size())) if logits.is_cpu else rows
    for start in range(0, rows, piece):
        x = logits[start : start + piece]
        peak = x.amax(-1)
        if greedy:
            best[start : start + piece] = x.argmax(-1)
        x.sub_(peak[:, None])
        if scaled:
            x.mul_(inverse[start : start + piece])
        x.exp_()
        _block_sums(x, sums[start : start + piece])
    return logits, sums, best


def _block_sums(weights: Tensor, out: Tensor) -> None:
    whole = weights.shape[1] // BLOCK * BLOCK
    torch.sum(weights[:, :whole].unflatten(1, (-1, BLOCK)), -1, out=out[:, : whole // BLOCK])
    if whole < weights.shape[1]:
        torch.sum(weights[:, whole:], -1, out=out[:, -1])


def _filter(weights: Tensor, sums: Tensor, table: SamplingTable, rows: list[int]) -> None:
    """Set the weights of tokens that may not be sampled to 0; order as in transformers: top-k, top-p, min-p."""
    kept, table = weights[rows], table.rows(rows)
    kept *= kept >= _smallest_top_k(kept, table)[:, None]
    kept *= kept >= _smallest_top_p(kept, table)[:, None]
    kept *= kept >= table.min_p[:, None].to(kept.dtype)
    filtered_sums = sums[rows]
    _block_sums(kept, filtered_sums)
    sums[rows] = filtered_sums
    weights[rows] = kept


def _smallest_top_k(weights: Tensor, table: SamplingTable) -> Tensor:
    """The smallest weight `[N]` that top-k keeps (0 where it is off)."""
    smallest = weights.new_zeros(len(weights))
    on = [row for row, p in enumerate(table.params) if 0 < p.top_k < weights.shape[1]]
    if on:
        largest = weights[on].topk(max(table.params[row].top_k for row in on), -1).values
        smallest[on] = largest.gather(1, table.top_k[on][:, None] - 1)[:, 0]
    return smallest


def _smallest_top_p(weights: Tensor, table: SamplingTable) -> Tensor:
    """The smallest weight `[N]` of the nucleus (0 where top-p is off): kept while the weights before sum to < p."""
    smallest = weights.new_zeros(len(weights))
    on = [row for row, p in enumerate(table.params) if p.top_p < 1]
    # On CPU a few largest weights mostly suffice; elsewhere asking whether they do takes longer than all of them.
    count = min(_CANDIDATES, weights.shape[1]) if weights.is_cpu else weights.shape[1]
    while on:
        largest = weights[on].topk(count, -1).values.double()
        reached = largest.cumsum(-1)
        needed = (table.top_p[on] * weights[on].sum(-1, dtype=torch.float64))[:, None]
        last = (reached - largest < needed).sum(-1, keepdim=True) - 1
        smallest[on] = largest.gather(1, last)[:, 0].to(weights.dtype)
        if count == weights.shape[1]:
            break
        on = [row for row, short in zip(on, (reached[:, -1] < needed[:, 0]).tolist(), strict=True) if short]
        count = weights.shape[1]
    return smallest


def _inverse_cdf(weights: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative weight passes u x total; sums in fp64."""
    rest, block = _first_above(sums.double(), uniforms)
    columns = block[:, None] * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = columns < weights.shape[1]
    candidates = weights.gather(1, columns.clamp(max=weights.shape[1] - 1)).double() * inside
    # The rounding of a block's own sum moves the boundary between two of its tokens by a part in 10^7.
    _, offset = _first_above(candidates, rest)
    return (block * BLOCK + offset).clamp(max=weights.shape[1] - 1)


def _first_above(values: Tensor, fraction: Tensor) -> tuple[Tensor, Tensor]:
    """The first index `[N]` whose cumulative sum exceeds `fraction` of the total; how far into that value, 0 to 1."""
    cumulative = values.cumsum(-1)
    total = cumulative[:, -1]
    target = torch.minimum(fraction * total, torch.nextafter(total, torch.zeros_like(total)))[:, None]
    index = torch.searchsorted(cumulative, target, right=True).clamp(max=values.shape[1] - 1)
    value = values.gather(1, index)
    before = cumulative.gather(1, index) - value
    return ((target - before) / value)[:, 0].clamp(0, 1), index[:, 0]
