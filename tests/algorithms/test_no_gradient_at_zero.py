"""The statement `no_gradient_at_zero`: it is true of every loss that has it, lost where a loss is overridden, and what
rows are left out because of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.algorithms.support import OFFLINE, ONLINE, loss_input, prepared
from tests.properties import examples
from verl.algorithms import BaseAlgorithm, Loss, LossInput, PolicyGradient, make_algorithm
from verl.algorithms.baselines import GRPO
from verl.algorithms.losses import PolicyLoss, PolicyTerms
from verl.algorithms.ppo import PPO
from verl.batch import Batch
from verl.training.micro_batch import zero_gradient_rows

CRITICS = {"safe_rlhf": {"baseline": "critics"}}
KL, ENTROPY = {"kl_in": "loss", "kl_coef": 0.05}, {"entropy_coeff": 0.01}
STATED = [
    name
    for name in (*ONLINE, *OFFLINE)
    if make_algorithm(name, **CRITICS.get(name, {})).objective("actor").loss_needs.no_gradient_at_zero
]
VARIANTS = [
    (name, {**options, **CRITICS.get(name, {})})
    for name in STATED
    for options in ({}, KL, ENTROPY, KL | ENTROPY)
    if not options or issubclass(type(make_algorithm(name)), PolicyGradient)
] + [
    ("grpo", {"rollout_is": "sequence"}),
    ("rloo", {"ratio_of": "sequence"}),
    ("gmpo", {"rollout_is": "sequence"}),
    ("ppo", {"cliprange_value": None}),
]


def test_the_losses_that_state_it() -> None:
    assert {*STATED} == {
        "cispo", "constrained_decoding", "dapo", "distillation", "dr_grpo", "gmpo", "gpg", "grpo", "grpo_passk", "gspo",
        "opo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "reward_conditioned", "rloo",
        "safe_rlhf", "sapo", "sft", "vespo",
    }  # fmt: skip


def with_zeros(batch: Batch, seed: int) -> Batch:
    """With advantages of 0, and tokens that do not count: here and there, and in whole rows."""
    draw, lengths = random.Random(seed), batch.lengths("response_tokens")

    def zeros(column: str) -> tuple[Tensor, list[int]]:
        values = batch.tensor(column, torch.float64) if column in batch else torch.ones(sum(lengths)).double()
        for row, part in enumerate(values.split(lengths)):
            part *= float(row % 3 != 0) * torch.tensor([float(draw.random() < 0.7) for _ in part])
        return values, lengths

    changed = {"advantages": zeros("advantages")} if "advantages" in batch else {}
    changed["response_mask"] = zeros("response_mask") if draw.random() < 0.5 else batch.arrow("response_mask")
    return batch.drop(changed).add(changed)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(VARIANTS)])
@examples(10)
@given(seed=st.integers(0, 10_000))
def test_a_token_of_weight_or_advantage_0_has_a_gradient_of_exactly_0(
    name: str, options: dict[str, Any], seed: int
) -> None:
    algorithm, batch = prepared(name, seed % 7, **options)
    batch = with_zeros(batch, seed)
    for role in algorithm.roles & {"actor", "critic", "cost_critic"}:
        objective = algorithm.objective(role)
        assert objective.loss_needs.no_gradient_at_zero
        torch.manual_seed(seed)
        names = ["log_probs" if role == "actor" else "values", *(["entropy"] if objective.loss_needs.entropy else [])]
        tokens = sum(batch.lengths("response_tokens"))
        outputs = {n: (-4 * torch.rand(tokens, dtype=torch.float64)).requires_grad_() for n in names}
        loss = objective.compute_loss(loss_input(objective, batch, **outputs)).total
        loss.backward()
        is_zero = objective.token_weights(batch) == 0
        if objective.loss_needs.advantages_decide:
            is_zero |= batch.tensor("advantages") == 0
        elif role == "actor" and isinstance(algorithm, PolicyGradient):
            assert options.keys() & {*KL, *ENTROPY} or algorithm.kl_in == "loss"
        for leaf in outputs.values():
            gradient = torch.zeros(tokens) if leaf.grad is None else leaf.grad
            assert bool((gradient[is_zero] == 0).all())
        rows = zero_gradient_rows(batch, objective.token_weights(batch), objective.loss_needs)
        expected = [row for row, part in enumerate(is_zero.split(batch.lengths("response_tokens"))) if bool(part.all())]
        assert rows == expected


def test_the_gradient_of_a_loss_without_the_statement_does_not_hang_on_weights() -> None:
    """Else it could state it: of ORPO the rejected rows have weight 0, of KTO and the losses of pairs nobody reads
    weights."""
    for name in ("orpo", "kto", "dpo"):
        algorithm, batch = prepared(name, 3)
        objective = algorithm.objective("actor")
        assert not objective.loss_needs.no_gradient_at_zero
        outputs = (-torch.rand(sum(batch.lengths("response_tokens")), dtype=torch.float64)).requires_grad_()
        x = loss_input(objective, batch, log_probs=outputs)
        objective.compute_loss(LossInput(**{**vars(x), "weights": torch.zeros_like(x.weights)})).total.backward()
        assert outputs.grad is not None and bool(outputs.grad.any())
        assert zero_gradient_rows(batch, torch.zeros(len(outputs)), objective.loss_needs) == []


class Squared(GRPO):
    def policy_loss(self, t: PolicyTerms) -> PolicyLoss:
        return PolicyLoss(t.log_probs.square())


class Weighted(GRPO):
    def importance(self, t: PolicyTerms, weights: Tensor) -> Tensor:
        return weights.sqrt()


class Whole(PPO):
    def compute_loss(self, x: LossInput) -> Loss:
        return super().compute_loss(x)


class Restated(Squared):
    no_gradient_at_zero = True


class Denied(GRPO):
    no_gradient_at_zero = False


class Mixin:
    def policy_loss(self, t: PolicyTerms) -> PolicyLoss:
        return PolicyLoss(t.log_probs)


class Mixed(Mixin, GRPO):
    pass


class OtherValues(PPO):
    def compute_critic_loss(self, x: LossInput) -> Loss:
        assert x.values is not None
        return Loss(total=x.values.square().sum())


class Plain(BaseAlgorithm):
    def compute_loss(self, x: LossInput) -> Loss:
        return Loss(total=(x.weights * self.needed_log_probs(x)).sum())


class OtherAdvantages(GRPO):
    norm_adv_by_std: bool = False


class ScoreHead(BaseAlgorithm):
    head: ClassVar[Any] = "score"
    no_gradient_at_zero = True

    def compute_loss(self, x: LossInput) -> Loss:
        assert x.scores is not None
        return Loss(total=x.scores.sum())


@pytest.mark.parametrize(
    ("cls", "holds"),
    [
        (Squared, False), (Weighted, False), (Whole, False), (Restated, True), (Denied, False), (Mixed, False),
        (Plain, False), (OtherAdvantages, True), (OtherValues, True), (ScoreHead, False),
    ],
)  # fmt: skip
def test_a_class_that_overrides_a_loss_loses_the_statement(cls: type[BaseAlgorithm], holds: bool) -> None:
    assert cls().objective("actor").loss_needs.no_gradient_at_zero is holds


def test_of_a_critic_its_own_loss_decides() -> None:
    assert not OtherValues().objective("critic").loss_needs.no_gradient_at_zero
    assert Whole().objective("critic").loss_needs.no_gradient_at_zero


def test_a_loss_that_is_put_into_an_instance_loses_the_statement() -> None:
    algorithm = GRPO()
    algorithm.policy_loss = lambda t: PolicyLoss(t.log_probs)  # type: ignore[method-assign]
    assert not algorithm.objective("actor").loss_needs.no_gradient_at_zero


def rows_with(advantages: Sequence[Sequence[float | None]]) -> Batch:
    return Batch.from_columns({"response_tokens": [[5] * len(row) for row in advantages], "advantages": advantages})


#: Rows: alike; a small number; a rounding; the last token alone; no token; minus 0.
ADVANTAGES = [[0.0, 0.0], [0.0, 1e-30], [-1e-17], [0.0, 0.0, 2.0], [], [-0.0]]
GRPO_NEEDS = GRPO().objective("actor").loss_needs


def test_rows_whose_advantages_are_all_0_as_stored_are_left_out() -> None:
    batch = rows_with(ADVANTAGES)
    weights = torch.ones(9)
    assert zero_gradient_rows(batch, weights, GRPO_NEEDS) == [0, 4, 5]
    weights[7] = 0.0  # of the token that alone had an advantage
    assert zero_gradient_rows(batch, weights, GRPO_NEEDS) == [0, 3, 4, 5]


@pytest.mark.parametrize(
    "change",
    [
        {"entropy": True},
        {"columns": (*GRPO_NEEDS.columns, "ref_log_probs")},
        {"columns": ("values", "returns")},
        {"columns": ()},
    ],
)
def test_where_more_than_advantages_counts_only_rows_of_weight_0_are_left_out(change: dict[str, Any]) -> None:
    """An entropy bonus, KL in the loss, a head of values, and a loss that reads no advantages."""
    needs = replace(GRPO_NEEDS, **change)
    weights = torch.ones(9)
    assert zero_gradient_rows(rows_with(ADVANTAGES), weights, needs) == [4]
    weights[2:5] = 0.0
    assert zero_gradient_rows(rows_with(ADVANTAGES), weights, needs) == [1, 2, 4]


def test_kl_in_the_loss_counts_whatever_its_coefficient() -> None:
    for options in ({"kl_in": "loss", "kl_coef": 0.0}, {"entropy_coeff": 1e-9}):
        needs = GRPO(**options).objective("actor").loss_needs
        assert zero_gradient_rows(rows_with(ADVANTAGES), torch.ones(9), needs) == [4]


@pytest.mark.parametrize("change", [{"coupled": True}, {"no_gradient_at_zero": False}])
def test_without_the_statement_or_with_coupled_rows_none_is_left_out(change: dict[str, Any]) -> None:
    assert zero_gradient_rows(rows_with(ADVANTAGES), torch.zeros(9), replace(GRPO_NEEDS, **change)) == []


def test_beside_a_loss_of_the_model_none_is_left_out() -> None:
    assert zero_gradient_rows(rows_with(ADVANTAGES), torch.zeros(9), GRPO_NEEDS, auxiliary_loss=True) == []
