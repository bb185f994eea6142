"""The dealing of rows: which rank computes which rows of a mini-batch, and in which micro-batches.

This is the one place that may see fewer rows than the mini-batch has (`computed` of `deal`). All else is decided over
all of its rows, whether they are computed or not: mini-batches and shuffles (`workers.update`), weights, denominators
and totals (`MiniBatch`), and whether there is an optimizer step. So rows whose gradient is known to be 0 (`left_out`)
are missing here, and nothing else changes.

A micro-batch costs its flat tokens: a prompt that several of its rows share counts once, and the last token
of a response does not count, because nothing is predicted from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from verl.batch import Batch

Numbers = npt.NDArray[np.int64]

#: Tokens that a response is taken to have before it is written.
_UNKNOWN = 128
#: The largest load that runs of neighbours may bring, in fair shares.
_FAIR = 1.05


class Limits(NamedTuple):
    """What a micro-batch may cost.

    Attributes:
        max_tokens: most flat tokens; a single row (or coupled group) above it goes alone.
        max_rows: most rows; a coupled group above it goes alone.
        share_prompts: a prompt that several of its rows have is computed once, and counts once.
    """

    max_tokens: int | None = None
    max_rows: int | None = None
    share_prompts: bool = True


class _Unit(NamedTuple):
    """Rows that stay together, and the tokens they cost in one forward."""

    rows: list[int]
    tokens: int


def deal(
    batch: Batch, computed: Sequence[int], ranks: int, limits: Limits, *, coupled: bool = False, in_step: bool = False
) -> list[list[list[int]]]:
    """For each data-parallel rank, the rows of each of its micro-batches. Every rank makes the same deal.

    Args:
        batch: a mini-batch, the rows of all ranks.
        computed: the rows to compute, ascending; together the micro-batches of all ranks are these, each once.
        coupled: rows of one `group` meet in one micro-batch.
        in_step: all ranks must run equally many forwards, because these have collectives of ranks with different rows.
            Then the micro-batches of a rank with fewer than the busiest, or without any rows, end with empty ones: it
            runs a forward and backward there whose loss is 0.
    """
    if len(computed) < len(batch):
        dealt = deal(batch.take(computed), range(len(computed)), ranks, limits, coupled=coupled, in_step=in_step)
        return [[[computed[row] for row in rows] for rows in micro_batches] for micro_batches in dealt]
    costs = _Costs(batch, limits.share_prompts, coupled)
    by_rank = _over_ranks(costs, ranks) if ranks > 1 else [list(computed)]
    micro_batches = [_split(costs, rows, limits) for rows in by_rank]
    most = max(map(len, micro_batches)) if in_step else 0
    return [parts + [[]] * (most - len(parts)) for parts in micro_batches]


def balanced(batch: Batch, parts: int, coupled: bool = False) -> list[list[int]]:
    """Row numbers for each of several ranks, ascending, so that ranks have about the same flat tokens to compute."""
    return _over_ranks(_Costs(batch, True, coupled), parts)


def _split(costs: _Costs, rows: Sequence[int], limits: Limits) -> list[list[int]]:
    """Some rows in micro-batches.

    Rows with an equal prompt stand side by side in one micro-batch where they fit, and are cut apart only
    where they do not. Units of similar length go together (their attention wastes least), and micro-batches
    cost about the same: no other cut of the sorted units into as few parts has a smaller largest part.
    """
    if costs.groups is not None:
        here = set(rows)
        together = [list(chain(*costs.prompt_sets(group))) for group in costs.groups if group[0] in here]
    else:
        together = [
            part for same in costs.prompt_sets(rows) for part in _fair_cut(same, partial(costs.fits, limits=limits))
        ]
    units = [_Unit(part, costs.tokens(part)) for part in together]
    units.sort(key=lambda unit: (-unit.tokens / len(unit.rows), unit.rows[0]))
    micro_batches = [[row for unit in part for row in unit.rows] for part in _pack(units, limits)]
    if costs.groups is None:  # two parts of a prompt's rows may have come together again, with others between them
        micro_batches = [[*chain(*costs.prompt_sets(part))] for part in micro_batches]
    return sorted(micro_batches, key=min)


def _over_ranks(costs: _Costs, parts: int) -> list[list[int]]:
    """See `balanced`. Rows with an equal prompt stay together, unless they are more than one rank's share; coupled
    groups always do. Neighbours stay neighbours where that is fair enough, since a run of rows need not be copied; else
    the dearest unit goes to the rank with the least so far (longest processing time first: at most 4/3 of the best).
    """
    count = len(costs.prompts)
    units = np.array(costs.prompt_ids, np.int64) if costs.groups is None else _numbered(costs.groups, count)
    tokens = costs.by_unit(units)
    # Ranks that share a prompt read it once each.
    fair = -(-int(tokens.sum()) // parts) + max(costs.prompts, default=0)
    if costs.groups is None and tokens.max(initial=0) > fair:
        sets = costs.prompt_sets(range(count))
        units = _numbered([part for rows in sets for part in _fair_cut(rows, lambda r: costs.tokens(r) <= fair)], count)
        tokens = costs.by_unit(units)
    total = int(tokens.sum())
    middle = 2 * tokens.cumsum() - tokens
    dealt = np.minimum(parts * middle // max(2 * total, 1), parts - 1)
    if np.bincount(dealt, tokens, parts).max() > _FAIR * total / parts:
        loads = [0] * parts
        for unit in np.argsort(-tokens, kind="stable").tolist():
            dealt[unit] = loads.index(min(loads))
            loads[dealt[unit]] += int(tokens[unit])
    ranks = dealt[units]
    return [np.flatnonzero(ranks == rank).tolist() for rank in range(parts)]


def _numbered(units: Sequence[Sequence[int]], rows: int) -> Numbers:
    """The number of each row's unit."""
    numbers = np.empty(rows, np.int64)
    for unit, members in enumerate(units):
        numbers[members] = unit
    return numbers


def _bytes(ragged: pa.Array) -> Iterator[bytes]:
    """The values of each row, as a key: far cheaper to make than a list of numbers."""
    values = ragged.values.to_numpy(zero_copy_only=False)
    data, width = memoryview(values).cast("B"), values.itemsize
    return (bytes(data[start * width : end * width]) for start, end in pairwise(ragged.offsets.to_pylist()))


class _Costs:
    """Prompts, lengths and (where they stay together) groups of a batch, and what a set of its rows costs."""

    def __init__(self, batch: Batch, share_prompts: bool, coupled: bool) -> None:
        # Before a rollout nothing is known of the responses: they count alike.
        has_responses = "response_tokens" in batch
        responses = batch.lengths("response_tokens") if has_responses else [_UNKNOWN] * len(batch)
        self.predicted = [max(length - 1, 0) for length in responses]
        self.prompts = batch.lengths("prompt_tokens")
        numbers: dict[object, int] = {}
        keys = _bytes(batch.arrow("prompt_tokens")) if share_prompts else range(len(batch))
        self.prompt_ids = [numbers.setdefault(key, len(numbers)) for key in keys]
        self.groups = batch.group_indices() if coupled else None

    def prompt_sets(self, rows: Sequence[int]) -> list[list[int]]:
        sets: dict[int, list[int]] = {}
        for row in rows:
            sets.setdefault(self.prompt_ids[row], []).append(row)
        return list(sets.values())

    def tokens(self, rows: Sequence[int]) -> int:
        if len(rows) == 1:
            return self.prompts[rows[0]] + self.predicted[rows[0]]
        prompts = {self.prompt_ids[row]: self.prompts[row] for row in rows}
        return sum(prompts.values()) + sum([self.predicted[row] for row in rows])

    def by_unit(self, units: Numbers) -> Numbers:
        """Tokens of each unit; `units` has the number of each row's."""
        ids, rows = np.array(self.prompt_ids, np.int64), max(len(units), 1)
        prompts = np.zeros(rows, np.int64)
        prompts[ids] = self.prompts
        once = np.unique(units * rows + ids)  # each prompt of a unit
        shared = np.bincount(once // rows, prompts[once % rows])
        return (shared + np.bincount(units, self.predicted)).astype(np.int64)

    def fits(self, rows: Sequence[int], limits: Limits) -> bool:
        max_tokens, max_rows, _ = limits
        return (max_rows is None or len(rows) <= max_rows) and (max_tokens is None or self.tokens(rows) <= max_tokens)


def _fair_cut(rows: list[int], fits: Callable[[list[int]], bool]) -> list[list[int]]:
    """Rows in as few even runs as fit; a row that does not fit alone is a run of its own."""
    for count in range(1, len(rows)):
        bounds = [len(rows) * i // count for i in range(count + 1)]
        runs = [rows[start:end] for start, end in pairwise(bounds)]
        if all(len(run) == 1 or fits(run) for run in runs):
            return runs
    return [[row] for row in rows]


def _pack(units: list[_Unit], limits: Limits) -> list[list[_Unit]]:
    """Consecutive units in as few parts as the limits allow, then with the smallest largest part."""
    max_tokens, max_rows, _ = limits
    total = sum(unit.tokens for unit in units)
    low, high = 0, total if max_tokens is None else min(max_tokens, total)
    best = _fill(units, high, max_rows)
    while low < high:
        middle = (low + high) // 2
        parts = _fill(units, middle, max_rows)
        if len(parts) <= len(best):
            best, high = parts, middle
        else:
            low = middle + 1
    return best


def _fill(units: list[_Unit], max_tokens: int, max_rows: int | None) -> list[list[_Unit]]:
    parts: list[list[_Unit]] = []
    tokens = rows = 0
    for unit in units:
        tokens, rows = tokens + unit.tokens, rows + len(unit.rows)
        if not parts or tokens > max_tokens or (max_rows is not None and rows > max_rows):
            parts.append([])
            tokens, rows = unit.tokens, len(unit.rows)
        parts[-1].append(unit)
    return parts
