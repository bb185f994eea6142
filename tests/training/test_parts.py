"""`TrainEngine.update(parts)`: all losses of a step at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.training.cases import (
    OPTIM,
    ROWS,
    gradients_of,
    make_engine,
    part,
    policy_loss,
    ragged_batch,
    tiny_model,
)
from verl.algorithms.loss_terms import Loss, LossInput, LossTerm
from verl.training.micro_batch import MiniBatch

OTHER_ROWS = [(2, 3), (2, 6), (6, 1)]


def square_loss(x: LossInput) -> Loss:
    assert x.log_probs is not None
    return Loss(
        total=0.3 * (x.weights * (x.log_probs + 1).square()).sum(),
        metrics={"squares": x.num_sequences / x.total_sequences},
    )


def two_parts() -> list[LossTerm]:
    """Two tasks: other rows, another loss, another temperature."""
    return [
        part(ragged_batch(ROWS), policy_loss, entropy=True),
        part(ragged_batch(OTHER_ROWS, seed=1), square_loss, temperature=0.7),
    ]


def plain_gradients(model: PreTrainedModel, parts: Sequence[LossTerm]) -> dict[str, Tensor]:
    """Of the sum of both losses, written out row by row."""
    total = torch.zeros((), dtype=torch.float64)
    for one in parts:
        picked, entropies = [], []
        for row in one.rows:
            prompt, response = row["prompt_tokens"], row["response_tokens"]
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            log_p = (logits / one.needs.temperature).log_softmax(-1)
            picked.append(log_p.gather(1, torch.tensor(response)[:, None])[:, 0])
            entropies.append(-(log_p.exp() * log_p).sum(-1))
        outputs = {"log_probs": torch.cat(picked)} | ({"entropy": torch.cat(entropies)} if one.needs.entropy else {})
        every = list(range(len(one.rows)))
        total = total + MiniBatch(one, torch.float64).loss(every, one.rows, outputs).total
    total.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_the_gradient_of_two_losses_is_the_sum_of_theirs(kind: str, micro_batch_size: int | None) -> None:
    expected = plain_gradients(tiny_model(kind), two_parts())
    engine = make_engine(tiny_model(kind), optim=OPTIM, micro_batch_size=micro_batch_size)
    found = gradients_of(engine, two_parts())
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max() <= 1e-12 * expected[name].abs().max(), name


def test_metrics_of_parts_add_up_and_a_part_without_rows_counts_nothing() -> None:
    first, second = two_parts()
    engine = make_engine(tiny_model(), optim=OPTIM)
    alone = [engine.loss([one]) for one in (first, second)]
    empty = part(second.rows.slice(0, 0), square_loss, torch.zeros(0))
    both = engine.update([first, empty, second])
    assert both["loss"] == pytest.approx(alone[0]["loss"] + alone[1]["loss"], rel=1e-12)
    assert (both["tokens"], both["squares"]) == (alone[0]["tokens"], alone[1]["squares"])
