"""Preference pairs: a pair is a group of two rows, one with label 1 (chosen), one with label 0 (rejected)."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.base import LossInput
from verl.batch import Batch
from verl.errors import DataError


def only_pairs(batch: Batch) -> tuple[Batch, dict[str, float]]:
    """The rows that form pairs, and how many rows do not (a missing partner, equal labels, a third row).

    Raises:
        DataError: no column `label`, or no pair at all.
    """
    labels = batch.tensor("label", torch.float64).tolist()
    paired = [False] * len(batch)
    for rows in batch.group_indices():
        if sorted(labels[row] for row in rows) == [0.0, 1.0]:
            paired[rows[0]] = paired[rows[1]] = True
    dropped = paired.count(False)
    if dropped == len(paired):
        raise DataError(
            f"none of {len(paired)} rows belongs to a preference pair: a pair is a group (column 'group') of two rows, "
            "one with label 1 and one with label 0"
        )
    return (batch.filter(paired) if dropped else batch), {"pairs/dropped_rows": float(dropped)}


def split_pairs(x: LossInput, values: Tensor) -> tuple[Tensor, Tensor]:
    """`[S]` -> (chosen `[G]`, rejected `[G]`) of the G pairs of this micro-batch, in the same order."""
    chosen = x.columns["label"] > 0.5
    order = torch.argsort(x.columns["group"], stable=True)
    return values[order[chosen[order]]], values[order[~chosen[order]]]


def sequence_log_probs(x: LossInput, log_probs: Tensor) -> Tensor:
    """`[R]` -> `[S]`: the sum of each row's written tokens."""
    return x.sum_by_sequence(torch.where(x.mask, log_probs, 0.0))


def sequence_tokens(x: LossInput) -> Tensor:
    """`[S]`: written tokens of each row, at least 1."""
    return x.sum_by_sequence(x.mask.to(x.weights.dtype)).clamp(min=1)
