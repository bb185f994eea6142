"""From a prepared batch to optimizer steps: mini-batches and epochs, for any model and any loss."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from verl.batch import Batch
from verl.errors import ConfigError, DataError
from verl.training.engine import TrainEngine
from verl.training.loss import Loss, LossInput, LossNeeds, LossPart


class Objective(Protocol):
    """The part of an algorithm that an update needs. Workers get it by value and never look one up by name."""

    @property
    def coupled(self) -> bool: ...
    @property
    def loss_columns(self) -> Sequence[str]: ...
    @property
    def needs_entropy(self) -> bool: ...
    @property
    def by_token(self) -> bool: ...
    def token_weights(self, batch: Batch) -> torch.Tensor: ...
    def compute_loss(self, x: LossInput) -> Loss: ...


@dataclass(frozen=True)
class UpdatePlan:
    """How a rollout batch becomes optimizer steps.

    Attributes:
        mini_batch_size: samples an optimizer step (groups stay whole); None: the whole batch at once.
        epochs: passes over the batch.
        temperature: of the rollout; log-probs are of logits divided by it.
        seed: of the order in which groups are visited.
    """

    mini_batch_size: int | None = None
    epochs: int = 1
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mini_batch_size is not None and self.mini_batch_size < 1:
            raise ConfigError(
                f"mini_batch_size must be at least 1, or None for the whole batch, not {self.mini_batch_size}"
            )
        if self.epochs < 1:
            raise ConfigError(f"epochs must be at least 1, not {self.epochs}")

    def updates(self, samples: int) -> int:
        """Optimizer steps for so many samples, if groups divide evenly."""
        size = self.mini_batch_size or samples
        return self.epochs * max(1, -(-samples // max(size, 1)))


def mini_batches(batch: Batch, plan: UpdatePlan, round_: int) -> Iterator[Batch]:
    """Mini-batches of all epochs. A plan of one step keeps the batch as it is; else groups are shuffled,
    by a permutation that depends on `(plan.seed, round_, epoch)` alone, so that a resumed run repeats it."""
    for epoch in range(plan.epochs):
        if plan.mini_batch_size is None or plan.mini_batch_size >= len(batch):
            yield batch
            continue
        groups = batch.group_indices()
        generator = torch.Generator().manual_seed(_seed(plan.seed, round_, epoch))
        rows: list[int] = []
        for index in torch.randperm(len(groups), generator=generator).tolist():
            rows += groups[index]
            if len(rows) >= plan.mini_batch_size:
                yield batch.take(rows)
                rows = []
        if rows:
            yield batch.take(rows)


def _seed(*numbers: int) -> int:
    digest = hashlib.sha256("/".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def run_updates(
    engine: TrainEngine, batch: Batch, objective: Objective, plan: UpdatePlan, round_: int
) -> dict[str, float]:
    """All optimizer steps of one update.

    A mini-batch of which no token counts (all rejected, or none written) is left out: moments and weight decay would
    move the weights without any gradient. Where all are left out, `update/empty` is 1.

    Returns:
        `update/steps`: mini-batches that reached the optimizer; `update/skipped`: those of them whose loss or gradient
        was not finite, so that nothing moved; and the other metrics of `TrainEngine.update`: means over the steps
        that were made (`/max` keys: maxima), or over the skipped ones if no step was made.

    Raises:
        DataError: there are no samples.
    """
    if len(batch) == 0:
        raise DataError("the update got no samples: every reward abstained, or every group was filtered out")
    found = []
    for mini_batch in mini_batches(batch, plan, round_):
        weights = objective.token_weights(mini_batch)
        if objective.by_token and not weights.any():
            continue
        found.append(engine.update([_part(mini_batch, weights, objective, plan)]))
    skipped = [step for step in found if step["update/skipped"]]
    counts = {"update/steps": float(len(found)), "update/skipped": float(len(skipped))}
    if not found:
        return {"loss": 0.0, "grad_norm": 0.0, **counts, "update/empty": 1.0}
    return mean_metrics([step for step in found if not step["update/skipped"]] or skipped) | counts


def compute_loss(engine: TrainEngine, batch: Batch, objective: Objective, plan: UpdatePlan) -> dict[str, float]:
    """`loss` and metrics of a whole batch under the weights as they are."""
    return engine.loss([_part(batch, objective.token_weights(batch), objective, plan)])


def _part(batch: Batch, weights: torch.Tensor, objective: Objective, plan: UpdatePlan) -> LossPart:
    needs = LossNeeds(
        columns=objective.loss_columns,
        temperature=plan.temperature,
        entropy=objective.needs_entropy,
        coupled=objective.coupled,
    )
    return LossPart(batch, objective.compute_loss, weights, needs)


def mean_metrics(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean over the parts that have a key; the maximum where the key ends in `/max`."""
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    return {n: max(found) if n.endswith("/max") else sum(found) / len(found) for n, found in values.items()}
