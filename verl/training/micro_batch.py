"""Partitioning of rows: which rank computes which rows of a mini-batch, and in which micro-batches.

Only here may rows be missing (`computed` of `partition`): those whose gradient is known to be 0 (`zero_gradient_rows`).
Mini-batches and shuffles (`workers.update`), weights, denominators and totals (`MiniBatch`), and whether there is an
optimizer step, are decided over all rows.

A micro-batch costs its flat tokens: what several of its rows begin with (`attention.prefix_tree`) counts once, and the
last token of a response does not count, because nothing is predicted from it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl._host.device import to_device
from verl.algorithms.loss_terms import Loss, LossInput, LossNeeds, LossTerm
from verl.attention.prefix_tree import PrefixTree, families, prefix_tree
from verl.batch import Batch
from verl.errors import DataError, TrainingError


class Limits(NamedTuple):
    """Bounds on a micro-batch.

    Attributes:
        max_tokens: most flat tokens; a single row (or coupled group) above it goes alone.
        max_rows: most rows; a coupled group above it goes alone.
        share_prompts: what several of its rows begin with is computed once, and counts once.
        share_responses: so is what of their responses is alike; without it only whole prompts count so.
    """

    max_tokens: int | None = None
    max_rows: int | None = None
    share_prompts: bool = True
    share_responses: bool = True


class _Unit(NamedTuple):
    """Rows that stay together, and the tokens they cost in one forward."""

    rows: list[int]
    tokens: int


def partition(
    batch: Batch, computed: Sequence[int], ranks: int, limits: Limits, *, coupled: bool = False, lockstep: bool = False
) -> tuple[list[list[list[int]]], PrefixTree]:
    """The rows of each micro-batch of each data-parallel rank, and the tree of those that are computed (the others have
    no path). Every rank makes the same partition.

    Args:
        batch: a mini-batch, the rows of all ranks.
        computed: the rows to compute, ascending; together the micro-batches of all ranks are these, each once.
        coupled: rows of one `group` meet in one micro-batch.
        lockstep: all ranks must run equally many forwards, because these have collectives of ranks with different rows.
            Then the micro-batches of a rank with fewer than the busiest, or without any rows, end with empty ones: it
            runs a forward and backward there whose loss is 0.
    """
    costs = _Costs(batch.take(computed) if len(computed) < len(batch) else batch, limits, coupled)
    by_rank = _over_ranks(costs, ranks) if ranks > 1 else [list(range(len(computed)))]
    micro_batches = [_split(costs, rows, limits) for rows in by_rank]
    most = max(map(len, micro_batches)) if lockstep else 0
    numbered = [
        [[computed[row] for row in rows] for rows in parts] + [[]] * (most - len(parts)) for parts in micro_batches
    ]
    paths: list[tuple[int, ...]] = [()] * len(batch)
    for row, path in zip(computed, costs.tree.paths, strict=True):
        paths[row] = path
    return numbered, PrefixTree(costs.tree.lengths, paths)


def zero_gradient_rows(rows: Batch, weights: Tensor, needs: LossNeeds, *, auxiliary_loss: bool = False) -> list[int]:
    """The rows of a mini-batch whose gradient is 0 whatever the model predicts, ascending: all of their tokens have a
    weight of 0 or, where nothing else counts in the loss (`LossNeeds.advantages_decide`), an advantage of exactly 0.

    None, unless the loss states `no_gradient_at_zero`, rows are not coupled in it, and the model adds no loss of its
    own (`auxiliary_loss`).

    Args:
        weights: `[R]`, of the response tokens of all rows.
    """
    lengths = rows.lengths("response_tokens")
    fits = len(weights) == sum(lengths)  # else `MiniBatch` refuses it
    if not needs.no_gradient_at_zero or needs.coupled or auxiliary_loss or not fits:
        return []
    counts = weights != 0
    if needs.advantages_decide and "advantages" in rows and rows.lengths("advantages") == lengths:
        counts &= rows.tensor("advantages") != 0
    flags = iter(counts.tolist())
    return [row for row, length in enumerate(lengths) if not any(list(islice(flags, length)))]


def balanced(batch: Batch, parts: int, coupled: bool = False) -> list[list[int]]:
    """Row numbers for each of several ranks, ascending, so that ranks have about the same flat tokens to compute."""
    return _over_ranks(_Costs(batch, Limits(), coupled), parts)


def shared_tokens(batch: Batch) -> int:
    """How many tokens fewer its rows are as trees than one by one."""
    tree = _Costs(batch, Limits(), False).tree
    return sum([tree.tokens([row]) for row in range(len(batch))]) - sum(tree.lengths)


def _split(costs: _Costs, rows: Sequence[int], limits: Limits) -> list[list[int]]:
    """Some rows in micro-batches.

    Rows of a tree are adjacent in one micro-batch if they fit; otherwise the tree is cut at a fork. Units of similar
    length go together (their attention wastes least), and micro-batches cost about the same: no other cut of the sorted
    units into as few parts has a smaller largest part.
    """
    trees = costs.tree.trees
    if costs.groups is not None:
        here = set(rows)
        together = [list(chain(*trees(group))) for group in costs.groups if group[0] in here]
    else:
        together = [part for tree in trees(rows) for part in costs.fair_cut(tree, limits)]
    units = [_Unit(part, costs.tokens(part)) for part in together]
    units.sort(key=lambda unit: (-unit.tokens / len(unit.rows), unit.rows[0]))
    micro_batches = [[row for unit in part for row in unit.rows] for part in _pack(units, limits)]
    if costs.groups is None:  # two parts of a tree may have come together again, with others between them
        micro_batches = [[*chain(*trees(part))] for part in micro_batches]
    return sorted(micro_batches, key=min)


def _over_ranks(costs: _Costs, parts: int) -> list[list[int]]:
    """See `balanced`. Rows of a tree stay together, unless they are more than one rank's share; coupled
    groups always do. Neighbours stay neighbours where that is fair enough, since a run of rows need not be copied; else
    the dearest unit goes to the rank with the least so far (longest processing time first: at most 4/3 of the best).
    """
    units = costs.tree.trees(range(len(costs.prompts))) if costs.groups is None else costs.groups
    tokens = [costs.tokens(unit) for unit in units]
    # Ranks that share a prompt, or another beginning, read it once each.
    forks = {path[:-1] for path in costs.tree.paths if len(path) > 1}
    shared = max([*costs.prompts, *(sum(costs.tree.lengths[node] for node in path) for path in forks)], default=0)
    fair = -(-sum(tokens) // parts) + shared
    if costs.groups is None and max(tokens, default=0) > fair:
        units = [part for tree in units for part in costs.fair_cut(tree, Limits(fair))]
        tokens = [costs.tokens(unit) for unit in units]
    loads, total = np.array(tokens, np.int64), sum(tokens)
    middle = 2 * loads.cumsum() - loads
    split = np.minimum(parts * middle // max(2 * total, 1), parts - 1)
    if np.bincount(split, loads, parts).max() > 1.05 * total / parts:  # the most that runs of neighbours may bring
        taken = [0] * parts
        for unit in np.argsort(-loads, kind="stable").tolist():
            split[unit] = taken.index(min(taken))
            taken[split[unit]] += tokens[unit]
    ranks: list[list[int]] = [[] for _ in range(parts)]
    for unit, rank in zip(units, split.tolist(), strict=True):
        ranks[rank] += unit
    return [sorted(rows) for rows in ranks]


def _ragged(batch: Batch, name: str) -> list[npt.NDArray[np.int64]]:
    """The values of each row, without a copy."""
    column = batch.arrow(name)
    values = column.values.to_numpy(zero_copy_only=False)
    return [values[start:end] for start, end in pairwise(column.offsets.to_pylist())]


class _Costs:
    """The rows of a batch as prefix trees and, if coupled, groups; and the cost in tokens of any set of them."""

    def __init__(self, batch: Batch, limits: Limits, coupled: bool) -> None:
        self.predicted = [127] * len(batch)  # a response is taken to have 128 tokens before it is written
        self.prompts = batch.lengths("prompt_tokens")
        self.groups = batch.group_indices() if coupled else None
        prompts = rows = _ragged(batch, "prompt_tokens")
        groups = batch["group"] if limits.share_responses and "group" in batch else None
        kin = families(prompts, groups) if limits.share_prompts else range(len(batch))
        if "response_tokens" in batch:
            responses = _ragged(batch, "response_tokens")
            rows = [np.concatenate([prompt, fed[:-1]]) for prompt, fed in zip(prompts, responses, strict=True)]
            self.predicted = [0] * len(rows)
        self.tree = prefix_tree(rows, self.prompts, kin, None if limits.share_responses else float("inf"))

    def tokens(self, rows: Sequence[int]) -> int:
        return self.tree.tokens(rows) + sum([self.predicted[row] for row in rows])

    def fits(self, rows: Sequence[int], limits: Limits) -> bool:
        max_tokens, max_rows, *_ = limits
        return (max_rows is None or len(rows) <= max_rows) and (max_tokens is None or self.tokens(rows) <= max_tokens)

    def fair_cut(self, rows: list[int], limits: Limits) -> list[list[int]]:
        """The rows of a tree in as few even runs of branches as fit. A branch that does not fit alone is cut at its
        next fork; a row that does not is a run of its own."""
        branches = self._branches(rows, limits, 1)
        for count in range(1, len(branches)):
            bounds = [len(branches) * i // count for i in range(count + 1)]
            runs = [list(chain(*branches[start:end])) for start, end in pairwise(bounds)]
            if all(
                end - start == 1 or self.fits(run, limits)
                for run, (start, end) in zip(runs, pairwise(bounds), strict=True)
            ):
                return runs
        return branches

    def _branches(self, rows: list[int], limits: Limits, depth: int) -> list[list[int]]:
        """The largest branches that fit, or single rows."""
        parts = []
        for part in self.tree.branches(rows, depth):
            whole = len(part) == 1 or self.fits(part, limits)
            parts += [part] if whole else self._branches(part, limits, depth + 1)
        return parts


def _pack(units: list[_Unit], limits: Limits) -> list[list[_Unit]]:
    """Consecutive units in as few parts as the limits allow, then with the smallest largest part."""
    max_tokens, max_rows, *_ = limits
    total = sum(unit.tokens for unit in units)
    most = total if max_tokens is None else min(max_tokens, total)
    fewest = len(_fill(units, most, max_rows))
    smallest = bisect_left(range(most), True, key=lambda tokens: len(_fill(units, tokens, max_rows)) == fewest)
    return _fill(units, smallest, max_rows)


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


class MiniBatch:
    """Weights, totals and columns of a part's rows.

    Args:
        precision: of weights and float columns.

    Raises:
        DataError: there is not one weight a response token.
    """

    def __init__(self, part: LossTerm, precision: torch.dtype) -> None:
        rows, weights = part.rows, part.weights
        lengths = rows.lengths("response_tokens")
        if weights.shape != (sum(lengths),):
            raise DataError(f"{sum(lengths)} response tokens need as many weights, got shape {list(weights.shape)}")
        self._part, self._precision, self._weights = part, precision, weights.split(lengths)
        masked, active = "response_mask" in rows, int(weights.count_nonzero())
        self._totals: dict[str, Any] = {
            "total_sequences": len(rows),
            "total_tokens": int(rows.tensor("response_mask").count_nonzero()) if masked else sum(lengths),
            "total_active": active,
            "total_groups": len(rows.group_indices()),
            "computed_tokens": active - sum(int(self._weights[row].count_nonzero()) for row in part.skipped),
            "computed_sequences": len(part.computed),
        }

    def loss(self, rows: list[int], batch: Batch, outputs: dict[str, Tensor]) -> Loss:
        """The loss of the micro-batch `batch`, which has these rows of the mini-batch.

        Raises:
            TrainingError: the loss function returns something else than a `Loss` of one number.
            DataError: a column has not one value a response token.
        """
        loss: object = self._part.loss(self._input(rows, batch, outputs))
        if not isinstance(loss, Loss):
            raise TrainingError(f"compute_loss must return a Loss, got {type(loss).__name__}: return Loss(total=...)")
        if loss.total.dim() != 0:
            raise TrainingError(f"Loss.total must be one number, got shape {list(loss.total.shape)}: sum it")
        return loss

    def _input(self, rows: list[int], batch: Batch, outputs: dict[str, Any]) -> LossInput:
        device = next(iter(outputs.values())).device
        lengths = batch.lengths("response_tokens")
        mask = _aligned(batch, "response_mask", lengths) if "response_mask" in batch else torch.ones(sum(lengths))
        wanted = self._part.needs.columns
        columns = {name: self._column(batch, name, lengths, device) for name in wanted if name in batch}
        if "old_log_probs" in wanted and "log_probs" in outputs:
            # One step on the policy's own samples: the policy that wrote them is the one of this very forward.
            columns.setdefault("old_log_probs", outputs["log_probs"].detach())
        mask = to_device(mask, device, torch.bool)
        # So that ratios are 1 where the head skips tokens.
        columns |= {name: torch.where(mask, columns[name], 0.0) for name in columns if name.endswith("log_probs")}
        return LossInput(
            **outputs,
            weights=to_device(torch.cat([self._weights[row] for row in rows]), device, self._precision),
            mask=mask,
            sequence=to_device(torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths)), device),
            num_sequences=len(rows),
            columns=columns,
            **self._totals,
        )

    def _column(self, batch: Batch, name: str, lengths: list[int], device: torch.device) -> Tensor:
        """`group` as an index `[S]`, ragged columns flat `[R]`, others `[S]`."""
        if name == "group":
            index = torch.empty(len(batch), dtype=torch.int64)
            for number, rows in enumerate(batch.group_indices()):
                index[rows] = number
            return to_device(index, device)
        is_ragged = hasattr(batch.arrow(name).type, "value_type")
        values = _aligned(batch, name, lengths) if is_ragged else batch.tensor(name)
        return to_device(values, device, self._precision if values.is_floating_point() else None)


def _aligned(batch: Batch, name: str, lengths: list[int]) -> Tensor:
    """The flat values of a column that has one value a response token."""
    counts = batch.lengths(name)
    for row, (have, want) in enumerate(zip(counts, lengths, strict=True)):
        if have != want:
            sample = f" (id {batch['id'][row]})" if "id" in batch else ""
            raise DataError(f"column '{name}' has {have} values for {want} response tokens in a row{sample}")
    return batch.tensor(name)
