"""Sampling a token from each row of logits by inverse CDF, in two levels, and the random numbers behind it.

Given its uniform u a row's token is fixed: the first in vocabulary order whose cumulative weight passes
u x total. The weights are summed over blocks of the vocabulary; the block is found among the block sums, the
token within its block. So one pass over the logits serves the choice and the log-prob, and nothing of
the size of the logits is sorted, scanned or allocated.

Random numbers have no state: token t of a sample gets a uniform that is a hash of (run seed, sample id, t), so neither
the batch a sample shares, nor preemption, resuming or the number of ranks can change it. The generator is SplitMix64
(Steele, Lea, Flood 2014), jumped to its (t+1)-th output, started from a 64-bit BLAKE2b key of seed and id; integer
arithmetic only, so equal on every platform.

On CPU a kernel does it; the torch code here is its reference, and serves other devices.

Legend: N rows, V vocabulary, B = ceil(V / BLOCK) blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl._host.device import is_host, to_device
from verl.kernels import compiled
from verl.kernels.compiled import Kernels
from verl.rollout.base import SamplingParams

BLOCK = 256
# Top-p looks at this many largest weights before it sorts a whole row.
_CANDIDATES = 1024
# SplitMix64.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def stream_key(seed: int, sample_id: str) -> int:
    """The 64-bit key of a sample's stream."""
    digest = hashlib.blake2b(f"{seed}\0{sample_id}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniforms(keys: Sequence[int], steps: Sequence[int]) -> npt.NDArray[np.float64]:
    """Number `steps[i]` of stream `keys[i]`, in [0, 1) with 53 random bits; `[N]`, `[N]` -> `[N]`."""
    counter = np.asarray(steps, np.uint64) + np.uint64(1)
    z = np.asarray(keys, np.uint64) + counter * _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    z = z ^ (z >> np.uint64(31))
    fractions: npt.NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return fractions


class SamplingFlags(NamedTuple):
    """What there is to do for some rows, known to the host: a question to tensors would wait for the device.

    Attributes:
        is_greedy, is_scaled, has_top_p, has_min_p: whether there is a row with this.
        top_k: at least the largest `top_k` of a row; 0: none has one.
    """

    is_greedy: bool
    is_scaled: bool
    top_k: int
    has_top_p: bool
    has_min_p: bool


def sampling_table(
    params: Sequence[SamplingParams], uniforms: npt.ArrayLike
) -> tuple[SamplingFlags, npt.NDArray[np.float64]]:
    """How rows are sampled: flags, and `[5, N]` uniforms, inverse temperatures (0: greedy), top-k, top-p and min-p."""
    inverse = [1 / p.temperature if p.temperature else 0.0 for p in params]
    filters = ([p.top_k for p in params], [p.top_p for p in params], [p.min_p for p in params])
    unlike = {id(p): p for p in params}.values()  # mostly a few objects; their hash takes longer
    sampled = [p for p in unlike if p.temperature]
    top_k = max((p.top_k for p in sampled), default=0)
    flags = SamplingFlags(
        is_greedy=len(sampled) < len(unlike),
        is_scaled=any(p.temperature != 1 for p in sampled),
        top_k=1 << (top_k - 1).bit_length() if top_k else 0,
        has_top_p=any(p.top_p < 1 for p in sampled),
        has_min_p=any(p.min_p > 0 for p in sampled),
    )
    return flags, np.array([uniforms, inverse, *filters], np.float64)


def sample(
    logits: Tensor,
    flags: SamplingFlags,
    table: Tensor,
    kernels: Kernels | None = None,
    edits: Mapping[int, Callable[[Tensor], Tensor]] = MappingProxyType({}),
) -> tuple[Tensor, Tensor]:
    """One token a row, and its log-prob under the temperature-scaled full distribution.

    Args:
        logits: `[N, V]`; computed in fp64 if they are fp64, else in fp32. May be overwritten.
        flags, table: of the N rows, see `sampling_table`.
        kernels: those for the dtype of the logits; None: the torch code computes the same.
        edits: by row, functions to the logits `[V]` to sample it from, given its own, which they may overwrite.

    Returns:
        Tokens `[N]` int64, and log-probs `[N]` fp64 of the logits before any edit: NaN where a row's logits are
        not finite, or its edit makes one NaN or plus infinity; minus infinity where its edit leaves no token.

    Deviation: where weights tie at the boundary of top-k or top-p all of them are kept, so that the outcome
    does not depend on an order of sorting.
    """
    if edits:
        return _sample_edited(logits, flags, table, kernels, edits)
    if kernels is None:
        return _sample_torch(logits.to(torch.promote_types(logits.dtype, torch.float32)), flags, table)
    uniforms, inverse, top_k, top_p, min_p = table
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens, log_probs = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.float64)
    columns = (uniforms, inverse, top_k.long(), top_p, min_p, tokens, log_probs)
    kernels.sample(logits, *columns, *logits.shape, logits.stride(0))
    return tokens, log_probs


def _sample_edited(
    logits: Tensor,
    flags: SamplingFlags,
    table: Tensor,
    kernels: Kernels | None,
    edits: Mapping[int, Callable[[Tensor], Tensor]],
) -> tuple[Tensor, Tensor]:
    """All rows as if there were no edits, then those that have one again."""
    rows = to_device(torch.tensor(list(edits)), logits.device)
    full = logits.index_select(0, rows).to(torch.promote_types(logits.dtype, torch.float32))
    edited = torch.stack([edit(row) for row, edit in zip(full.clone(), edits.values(), strict=True)]).to(full)
    top, special = edited.amax(-1), table.index_select(1, rows)
    tokens, log_probs = sample(logits, flags, table, kernels)
    if kernels is not None and full.dtype != logits.dtype:
        kernels = compiled.kernels(full.dtype, full.device)
    chosen, _ = sample(edited, flags, special, kernels)
    # What an edit rules out belongs to the distribution that the log-prob is of.
    inverse = special[1].masked_fill(special[1] == 0, 1.0)
    both = full.gather(1, torch.stack([chosen, tokens.index_select(0, rows)], 1)).double()
    chosen_log_probs = log_probs.index_select(0, rows) + (both[:, 0] - both[:, 1]) * inverse
    chosen_log_probs.masked_fill_(top == -torch.inf, -torch.inf).masked_fill_(~(top < torch.inf), torch.nan)
    return tokens.index_copy(0, rows, chosen), log_probs.index_copy(0, rows, chosen_log_probs)


def _sample_torch(logits: Tensor, flags: SamplingFlags, table: Tensor) -> tuple[Tensor, Tensor]:
    """`sample` in torch operations; fp32 or fp64 logits are overwritten."""
    uniforms, inverse, top_k, top_p, min_p = table
    greedy = inverse == 0
    best = logits.argmax(-1) if flags.is_greedy else None
    weights = logits.sub_(logits.amax(-1, keepdim=True))
    if flags.is_scaled:
        weights.mul_(torch.where(greedy, 1.0, inverse).to(weights.dtype)[:, None])
    sums = _block_sums(weights.exp_())
    log_total = sums.double().sum(-1).log()
    if flags.top_k or flags.has_top_p or flags.has_min_p:
        # The log-prob below is of a kept token, whose weight stays as it is.
        _filter(weights, flags, top_k, top_p, min_p)
        sums = _block_sums(weights)
    tokens = _inverse_cdf(weights, sums, uniforms)
    if best is not None:
        tokens = torch.where(greedy, best, tokens)
    log_probs = weights.gather(1, tokens[:, None])[:, 0].double().log() - log_total
    return tokens, log_probs


def _block_sums(weights: Tensor) -> Tensor:
    """Sums `[N, B]` of the blocks."""
    whole = weights.shape[1] // BLOCK * BLOCK
    sums = weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1)
    return sums if whole == weights.shape[1] else torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], 1)


def _filter(weights: Tensor, flags: SamplingFlags, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Set the weights of tokens that may not be sampled to 0; order as in transformers: top-k, top-p, min-p. Rows
    without a filter stay as they are."""
    if flags.top_k:
        count, top_k = min(flags.top_k, weights.shape[1]), top_k.long()
        smallest = weights.topk(count, -1).values.gather(1, (top_k - 1).clamp(0, count - 1)[:, None])
        weights *= weights >= smallest.masked_fill_(((top_k == 0) | (top_k > weights.shape[1]))[:, None], 0)
    if flags.has_top_p:
        weights *= weights >= _smallest_top_p(weights, top_p)[:, None]
    if flags.has_min_p:
        weights *= weights >= min_p[:, None].to(weights.dtype)


def _smallest_top_p(weights: Tensor, top_p: Tensor) -> Tensor:
    """The smallest weight `[N]` of the nucleus (0 where top-p is off): kept while the weights before sum to < p."""
    needed = (top_p * weights.sum(-1, dtype=torch.float64))[:, None]
    off = top_p >= 1
    # Where the host can ask whether a few largest weights suffice, they mostly do.
    count = min(_CANDIDATES, weights.shape[1]) if is_host(weights.device) else weights.shape[1]
    largest = weights.topk(count, -1).values.double()
    reached = largest.cumsum(-1)
    if count < weights.shape[1] and bool(((reached[:, -1] < needed[:, 0]) & ~off).any()):
        largest = weights.sort(-1, descending=True).values.double()
        reached = largest.cumsum(-1)
    # In a row that is not finite nothing is below.
    last = ((reached - largest < needed).sum(-1, keepdim=True) - 1).clamp(min=0)
    return largest.gather(1, last)[:, 0].to(weights.dtype).masked_fill_(off, 0)


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
