"""Mini-batches of an update: their order, and the metrics over them."""

from __future__ import annotations

import math

import pytest
import torch

from tests.training.cases import OPTIM, make_engine, policy_loss, ragged_batch, tiny_model, token_weights
from verl.algorithms.loss_terms import Loss, LossInput, LossNeeds
from verl.batch import Batch
from verl.workers.update import MiniBatchPlan, TaskLoss, mini_batches, run_updates

#: Prompts in the order of seed 0, round 0: two epochs of eight.
GOLDEN = [6, 2, 1, 7, 3, 0, 5, 4, 6, 7, 0, 4, 1, 2, 3, 5]


def order(seed: int, round_: int) -> list[str]:
    batch = ragged_batch([(p, 2) for p in range(8)])
    plan = MiniBatchPlan(2, epochs=2, seed=seed)
    return [id_ for (part,) in mini_batches([batch], plan, round_) for id_ in part["id"]]


def test_the_order_of_mini_batches_is_the_same_everywhere() -> None:
    numbers = [int(id_[0]) for id_ in order(0, 0)]
    assert numbers == GOLDEN
    assert sorted(numbers[:8]) == sorted(numbers[8:]) == list(range(8))


def test_every_seed_and_round_has_an_order_of_its_own() -> None:
    orders = {tuple(order(seed, round_)) for seed in (-2, -1, 0, 1) for round_ in range(8)}
    assert len(orders) == 32


class Objective:
    """`policy_loss`, except that the loss of some mini-batches is not finite."""

    by_token = True
    loss_needs = LossNeeds(columns=("advantages", "reward"))

    def __init__(self, *bad: int) -> None:
        self.bad, self.seen = bad, 0

    def token_weights(self, batch: Batch) -> torch.Tensor:
        return token_weights(batch)

    def compute_loss(self, x: LossInput) -> Loss:
        loss, self.seen = policy_loss(x), self.seen + 1
        if self.seen - 1 in self.bad:
            return Loss(total=loss.total * math.nan, metrics={"tokens": math.nan, "rows/max": math.inf})
        return loss


def updated(*bad: int) -> dict[str, float]:
    engine = make_engine(tiny_model(), optim=OPTIM)
    batch = ragged_batch([(p, 5) for p in range(4)])
    return run_updates(engine, [TaskLoss(batch, Objective(*bad))], MiniBatchPlan(1), 0)


def test_a_skipped_mini_batch_is_counted_and_the_others_metrics_stand() -> None:
    metrics = updated(1)
    assert metrics["update/steps"] == 4
    assert metrics["update/skipped"] == 1
    assert metrics["tokens"] == 1
    assert metrics["rows/max"] == 1
    assert all(math.isfinite(value) for value in metrics.values())


def test_an_update_of_which_every_mini_batch_was_skipped_shows_what_was_not_finite() -> None:
    metrics = updated(0, 1, 2, 3)
    assert metrics["update/steps"] == metrics["update/skipped"] == 4
    assert math.isnan(metrics["loss"])


def test_gradient_sums_are_freed_after_an_update_where_a_device_has_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for has_device in (False, True):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda has_device=has_device: has_device)
        engine = make_engine(tiny_model(), optim=OPTIM)
        batch = ragged_batch([(p, 5) for p in range(4)])
        for round_ in range(2):
            run_updates(engine, [TaskLoss(batch, Objective())], MiniBatchPlan(2), round_)
            sums = [weight.gradient for weight in engine.optimizer.gradients.weights]
            assert all((total is None) is has_device for total in sums)
        results.append([weight.detach().clone() for weight in engine.model.parameters()])
    assert all(map(torch.equal, *results))
