"""The record that a loss reads, and how metrics of micro-batches combine."""

from __future__ import annotations

import torch

from verl.algorithms.loss_terms import Loss, LossInput, combine_metrics


def _record(lengths: list[int]) -> LossInput:
    count = sum(lengths)
    return LossInput(
        weights=torch.ones(count),
        mask=torch.ones(count, dtype=torch.bool),
        sequence=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        num_sequences=len(lengths),
        total_sequences=len(lengths),
        total_tokens=count,
        total_active=count,
        total_groups=len(lengths),
    )


def test_sum_by_sequence_counts_empty_responses_and_has_a_gradient() -> None:
    x = _record([2, 0, 3])
    values = torch.arange(5.0, dtype=torch.float64, requires_grad=True)
    sums = x.sum_by_sequence(values)
    assert sums.tolist() == [1.0, 0.0, 9.0]
    (sums * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 1.0, 100.0, 100.0, 100.0]


def test_metrics_add_up_except_maxima() -> None:
    parts = [{"kl": torch.tensor(0.25), "ratio/max": 3.0}, {"kl": 0.5, "ratio/max": 2.0, "rare": 1.0}]
    assert combine_metrics(parts) == {"kl": 0.75, "ratio/max": 3.0, "rare": 1.0}


def test_a_detached_loss_holds_no_graph() -> None:
    x = torch.ones(3, requires_grad=True)
    loss = Loss(total=x.sum(), metrics={"a": x.mean(), "b": 2.0}).detached()
    assert not loss.total.requires_grad
    assert not loss.metrics["a"].requires_grad  # type: ignore[union-attr]
    assert loss.metrics["b"] == 2.0
