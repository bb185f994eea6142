"""Joining what verbs return to the sequences they were asked about."""

from __future__ import annotations

from typing import Any

from verl.batch import Batch
from verl.errors import DataError


def aligned(sequences: Batch, given: Any, name: str) -> Batch:
    """`sequences` with the column `name` from `given`: a `Batch` of the same rows, or a list or tensor of one
    item a row.

    Raises:
        DataError: the rows are not the same.
    """
    if isinstance(given, Batch):
        if "id" in given and "id" in sequences and given["id"] != sequences["id"]:
            raise DataError(f"the {name} belong to other samples than the sequences: pass them in the same order")
        return sequences.add(given)
    return sequences.add({name: given})


def add_rewards(sequences: Batch, rewards: Any) -> Batch:
    """`sequences` with `reward` (and its components). Numbers that are not finite abstain."""
    if isinstance(rewards, Batch):
        return aligned(sequences, rewards, "reward")
    if hasattr(rewards, "tolist"):
        rewards = rewards.tolist()
    numbers = [None if r is None or r != r or r in (float("inf"), float("-inf")) else float(r) for r in rewards]
    return aligned(sequences, numbers, "reward")
