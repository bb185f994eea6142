"""What `Actor.update` and `Critic.update` optimise when nobody said."""

from __future__ import annotations

from verl.algorithms.base import BaseAlgorithm
from verl.algorithms.registry import make_algorithm
from verl.batch import Batch


def default_algorithm(batch: Batch) -> BaseAlgorithm:
    """PPO where the batch has values; else GRPO where every group has several samples, else REINFORCE++.

    Without KL: an algorithm made anew for each call has no adaptive coefficient, and needs no reference model.
    """
    return usual_algorithm("values" in batch, all(len(rows) > 1 for rows in batch.group_indices()))


def usual_algorithm(has_values: bool, several: bool) -> BaseAlgorithm:
    """The same, of samples that are yet to come; `several` a prompt."""
    return value_algorithm() if has_values else make_algorithm("grpo" if several else "reinforce_plus_plus")


def value_algorithm() -> BaseAlgorithm:
    """PPO without a reference model: its returns and its value loss."""
    return make_algorithm("ppo", kl_in="none", kl_target=None)
