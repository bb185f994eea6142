"""From a prepared batch to optimizer steps: mini-batches and epochs, for any model and any loss."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from verl.algorithms.base import RoleObjective
from verl.algorithms.loss_terms import Loss, LossInput, LossTerm
from verl.batch import Batch
from verl.errors import ConfigError, DataError
from verl.training.engine import TrainEngine
from verl.training.micro_batch import shared_tokens, zero_gradient_rows


@dataclass(frozen=True)
class TaskLoss:
    """One of the objectives of an update, with its samples.

    Attributes:
        rows: what the algorithm has prepared.
        temperature: of the rollout; log-probs are of logits divided by it.
        weight: factor of the loss; a part of weight 0 is left out.
        name: begins the names of its metrics, where an update has several parts.
    """

    rows: Batch
    objective: RoleObjective
    temperature: float = 1.0
    weight: float = 1.0
    name: str = ""


@dataclass(frozen=True)
class MiniBatchPlan:
    """How a rollout batch becomes optimizer steps.

    Attributes:
        mini_batch_size: samples an optimizer step, of trajectories episodes (groups stay whole); None: the whole batch
            at once.
        epochs: passes over the batch.
        temperature: of the rollout, where samples do not say another.
        seed: of the order in which groups are visited.
        skip_zero_advantage_rows: rows whose gradient is known to be 0 are not computed; see `zero_gradient_rows`.
    """

    mini_batch_size: int | None = None
    epochs: int = 1
    temperature: float = 1.0
    seed: int = 0
    skip_zero_advantage_rows: bool = True

    def __post_init__(self) -> None:
        if self.mini_batch_size is not None and self.mini_batch_size < 1:
            raise ConfigError(
                f"mini_batch_size must be at least 1, or None for the whole batch, not {self.mini_batch_size}"
            )
        if self.epochs < 1:
            raise ConfigError(f"epochs must be at least 1, not {self.epochs}")

    def updates(self, samples: int) -> int:
        """Optimizer steps of an update, if groups divide evenly."""
        return self.epochs * max(1, -(-samples // (self.mini_batch_size or max(samples, 1))))


def mini_batches(batches: Sequence[Batch], plan: MiniBatchPlan, round_: int) -> Iterator[list[Batch]]:
    """The rows of each batch in each mini-batch, over all epochs: every batch has the same share in each, as far as
    whole groups allow.

    A plan of one step keeps the batches as they are; else groups are shuffled, by a permutation that depends on
    `(plan.seed, round_, epoch)` alone, so that a resumed run repeats it.
    """
    count = plan.updates(sum(batch.samples for batch in batches)) // plan.epochs
    for epoch in range(plan.epochs):
        if count == 1:
            yield list(batches)
            continue
        digest = hashlib.sha256(f"{plan.seed}/{round_}/{epoch}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big") >> 1
        cuts = [_cut(batch, count, seed) for batch in batches]
        for rows in zip(*cuts, strict=True):
            if any(rows):
                yield [batch.take(chosen) for batch, chosen in zip(batches, rows, strict=True)]


def _cut(batch: Batch, count: int, seed: int) -> list[list[int]]:
    """The rows of each of `count` mini-batches: shuffled groups, one after another."""
    groups, samples = batch.group_indices(), {members[0] for members in batch.group_indices("episode")}
    rows: list[list[int]] = [[] for _ in range(count)]
    before = 0
    for index in torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist():
        rows[before * count // len(samples)] += groups[index]
        before += len(samples.intersection(groups[index]))
    return rows


def run_updates(engine: TrainEngine, parts: Sequence[TaskLoss], plan: MiniBatchPlan, round_: int) -> dict[str, float]:
    """All optimizer steps of one update, each on the weighted sum of the losses of all parts.

    A part with no token to train on (all rejected, or none written) is left out of its mini-batch. A mini-batch without
    parts takes no step: moments and weight decay would move the weights without any gradient. `update/empty` is 1 if
    no step is left.

    Returns:
        `update/steps`: mini-batches that reached the optimizer; `update/skipped`: how many of them moved nothing, since
        loss or gradient was not finite; `update/rows_left_out` and `update/tokens_left_out`, rows that each pass
        over the samples did not compute, and the tokens of their responses; `update/tokens_shared`, tokens of a pass
        that rows have in common with others and that are computed once (as far as micro-batches and ranks do not part
        such rows), or `update/tokens_flat`, where the engine computes all of each row; and the other metrics of
        `TrainEngine.update`: means over the steps that were made (`/max` keys: maxima), or over the skipped ones if no
        step was made. If there are several parts, each has its metrics and its unweighted `loss` under its name.

    Raises:
        DataError: there are no samples.
    """
    if not sum(len(part.rows) for part in parts):
        raise DataError(
            "the update got no samples: every reward abstained, or every group was filtered out or had one sample left"
        )
    steps, rows_left_out, tokens_left_out, shared = [], 0, 0, 0
    for batches in mini_batches([part.rows for part in parts], plan, round_):
        present = [replace(p, rows=rows) for p, rows in zip(parts, batches, strict=True) if len(rows) and p.weight]
        terms = [(part, loss_term(engine, part, plan.skip_zero_advantage_rows)) for part in present]
        losses = [loss for part, loss in terms if not part.objective.by_token or bool(loss.weights.any())]
        if losses:
            steps.append(engine.update(losses))
        rows_left_out += sum(len(loss.skipped) for loss in losses)
        shared += sum(shared_tokens(loss.rows.take(loss.computed)) for loss in losses)
        tokens_left_out += sum(sum(loss.rows.take(loss.skipped).lengths("response_tokens")) for loss in losses)
    # A device's memory is the KV cache's until the next update. (DeepSpeed frees its own sums.)
    if torch.accelerator.is_available() and hasattr(engine.optimizer, "gradients"):
        engine.optimizer.gradients.free()
    skipped = [step for step in steps if step["update/skipped"]]
    counts = {
        "update/steps": float(len(steps)),
        "update/skipped": float(len(skipped)),
        "update/rows_left_out": rows_left_out / plan.epochs,
        "update/tokens_left_out": tokens_left_out / plan.epochs,
        "update/tokens_shared": shared * engine.shares_prefixes / plan.epochs,
        "update/tokens_flat": shared * (not engine.shares_prefixes) / plan.epochs,
    }
    if not steps:
        return {"loss": 0.0, "grad_norm": 0.0, **counts, "update/empty": 1.0}
    return mean_metrics([step for step in steps if not step["update/skipped"]] or skipped) | counts


def loss_term(engine: TrainEngine, part: TaskLoss, skip_zero_advantage_rows: bool) -> LossTerm:
    """The loss of a mini-batch, or of a whole batch, for an engine."""
    objective, rows = part.objective, part.rows
    needs, weights = replace(objective.loss_needs, temperature=part.temperature), objective.token_weights(rows)
    skipped: Sequence[int] = ()
    if skip_zero_advantage_rows:
        skipped = zero_gradient_rows(rows, weights, needs, auxiliary_loss=engine.has_auxiliary_loss)
    return LossTerm(rows, partial(_weighted, part) if part.name else objective.compute_loss, weights, needs, skipped)


def _weighted(part: TaskLoss, x: LossInput) -> Loss:
    """The loss of one of several parts, whose metrics begin with its name."""
    loss = part.objective.compute_loss(x)
    metrics = {"loss": loss.total.detach(), **loss.metrics}
    return Loss(total=part.weight * loss.total, metrics={f"{part.name}/{name}": v for name, v in metrics.items()})


def mean_metrics(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean over the parts that have a key; the maximum where the key ends in `/max`."""
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    return {n: max(numbers) if n.endswith("/max") else sum(numbers) / len(numbers) for n, numbers in values.items()}
