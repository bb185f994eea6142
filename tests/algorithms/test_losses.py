"""Aggregation, KL and per-token losses against loops, and their clipping."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from verl.algorithms import make_algorithm
from verl.algorithms.baselines import GPG, RLOO
from verl.algorithms.kl import adapted, kl_estimate
from verl.algorithms.losses import AggregationMode, PolicyLoss, PolicyTerms, aggregation_weights, value_loss
from verl.algorithms.pairs import ORPO
from verl.algorithms.ppo import PPO
from verl.algorithms.ratios import CISPO, GMPO, GSPO, SAPO, VESPO
from verl.errors import ConfigError

LENGTHS = [3, 0, 2, 4]
SEQUENCE = torch.tensor([0, 0, 0, 2, 2, 3, 3, 3, 3])
MASK = torch.tensor([1, 0, 1, 0, 0, 1, 1, 1, 0]) != 0


@pytest.mark.parametrize("mode", AggregationMode.__args__)  # type: ignore[attr-defined]
def test_aggregation_modes(mode: str) -> None:
    losses = [0.5, 9.0, -1.0, 9.0, 9.0, 2.0, 3.0, 4.0, 9.0]
    rows = [
        [x for x, m, s in zip(losses, MASK.tolist(), SEQUENCE.tolist(), strict=True) if m and s == row]
        for row in range(4)
    ]
    rows = [row for row in rows if row]
    expected = {
        "token-mean": sum(map(sum, rows)) / sum(map(len, rows)),
        "token-sum": sum(map(sum, rows)),
        "seq-mean-token-sum": sum(map(sum, rows)) / len(rows),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in rows) / len(rows),
        "seq-mean-token-sum-norm": sum(map(sum, rows)) / len(rows) / max(LENGTHS),
    }
    weights = aggregation_weights(MASK, SEQUENCE, 4, mode)
    got = (weights * torch.tensor(losses, dtype=torch.float64)).sum()
    assert got == pytest.approx(expected[mode], abs=1e-12)
    assert not weights[~MASK].any()


def test_aggregation_of_nothing_is_zero_and_an_unknown_mode_is_named() -> None:
    for mode in AggregationMode.__args__:  # type: ignore[attr-defined]
        assert not aggregation_weights(torch.zeros(9, dtype=torch.bool), SEQUENCE, 4, mode).any()
        assert aggregation_weights(torch.zeros(0) != 0, SEQUENCE[:0], 0, mode).shape == (0,)
    assert aggregation_weights(MASK, SEQUENCE, 4, "seq-mean-token-sum-norm", 10.0).max() == pytest.approx(1 / 20)
    with pytest.raises(ConfigError, match="token-mean"):
        make_algorithm("grpo", loss_agg_mode="token-maen")


def test_kl_estimates_and_their_gradients() -> None:
    p = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([-1.5, -1.0, -0.5], dtype=torch.float64)
    d = [float(a - b) for a, b in zip(p.detach(), q, strict=True)]
    formulas = {
        "k1": (d, [1.0] * 3),
        "k2": ([x * x / 2 for x in d], d),
        "k3": ([math.exp(-x) - 1 + x for x in d], [1 - math.exp(-x) for x in d]),
        "abs": ([abs(x) for x in d], [1.0, -1.0, 0.0]),
    }
    for name, alias in (("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl"), ("abs", "abs")):
        value, gradient = formulas[name]
        for spelling in (name, alias, name + "+", alias + "+"):
            got = kl_estimate(p, q, spelling)
            assert got.tolist() == pytest.approx(value)
            slope = torch.autograd.grad(got.sum(), p)[0]
            # Straight-through: the value of the estimator, the gradient of k2.
            assert slope.tolist() == pytest.approx(d if spelling.endswith("+") else gradient)
    with pytest.raises(ConfigError, match="k3"):
        make_algorithm("grpo", kl_in="loss", kl_estimator="k4")


@pytest.mark.parametrize("distance", [2.0, 4.0, 19.0])
def test_k3_pulls_the_harder_the_further_the_reference_is(distance: float) -> None:
    p = torch.tensor([-distance], dtype=torch.float64, requires_grad=True)
    value = kl_estimate(p, torch.zeros_like(p), "k3")
    assert float(value.detach()) == pytest.approx(math.exp(distance) - 1 - distance)
    assert float(torch.autograd.grad(value.sum(), p)[0]) == pytest.approx(1 - math.exp(distance))


@pytest.mark.parametrize("distance", [21.0, 40.0, 100.0, 1e4])
def test_beyond_its_bound_k3_is_finite_and_still_pulls(distance: float) -> None:
    p = torch.tensor([-distance], requires_grad=True)
    value = kl_estimate(p, torch.zeros_like(p), "k3")
    (slope,) = torch.autograd.grad(value.sum(), p)
    assert value.isfinite().all() and float(slope) == pytest.approx(-math.exp(20.0), rel=1e-5)
    unbounded = kl_estimate(p.double(), torch.zeros(1, dtype=torch.float64), "k3", math.inf)
    assert float(unbounded.detach()) == pytest.approx(math.exp(distance) if distance < 700 else math.inf)


def far(log_ratio: float, advantage: float) -> PolicyTerms:
    """One row of one token that is further from the old policy than any bound."""
    log_probs = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    return PolicyTerms(log_probs, log_probs * 1.0, advantage * one, one.bool(), torch.zeros(1, dtype=torch.int64), 1)


FAR_LOSSES: dict[str, tuple[Callable[[PolicyTerms], PolicyLoss], float, float]] = {
    "clipped": (PPO(clip_ratio_c=None).policy_loss, 30.0, -1.0),
    "gspo": (GSPO(clip_ratio_low=0.2, clip_ratio_high=0.2).policy_loss, 30.0, -1.0),
    "gmpo, up": (GMPO().policy_loss, 30.0, -1.0),
    "gmpo, down": (GMPO().policy_loss, -30.0, 1.0),
    "rloo of sequences": (RLOO(ratio_of="sequence", clip_ratio_c=None).policy_loss, 30.0, -1.0),
    "KL times the ratio": (lambda t: PolicyLoss(RLOO().ratio(t)), 30.0, 1.0),
}


@pytest.mark.parametrize("name", FAR_LOSSES)
def test_a_bound_against_overflow_takes_no_gradient_away(name: str) -> None:
    loss, log_ratio, advantage = FAR_LOSSES[name]
    t = far(log_ratio, advantage)
    per_token = loss(t).per_token
    (slope,) = torch.autograd.grad(per_token.sum(), t.log_probs)
    assert per_token.isfinite().all() and slope.isfinite().all()
    assert abs(float(slope)) == pytest.approx(abs(float(per_token.detach()))), "the gradient of an exponential"


def test_orpo_pushes_a_rejected_response_down_that_is_certain() -> None:
    rejected = torch.tensor([0.0, -1e-9, -1e-3], dtype=torch.float64, requires_grad=True)
    chosen = torch.full((3,), -1.0, dtype=torch.float64)
    loss = ORPO(beta=1.0).pair_losses(chosen, rejected)
    (slope,) = torch.autograd.grad(loss.sum(), rejected)
    assert loss.isfinite().all() and slope.isfinite().all()
    assert slope[0] >= slope[2] and slope[1] >= slope[2] > 500  # as 1 / (1 - p)


def test_the_controller_moves_towards_its_target() -> None:
    coefficient = 0.01
    for kl, factor in ((0.5, 1.1), (0.1, 1.0), (0.0, 0.9), (float("nan"), 1.0), (float("inf"), 1.0)):
        before, coefficient = coefficient, adapted(coefficient, kl, samples=50, target=0.1, horizon=100)
        assert coefficient == pytest.approx(before * factor, rel=0 if factor == 1 else 1e-6)


def terms(seed: int = 0) -> PolicyTerms:
    rng = random.Random(seed)

    def draw() -> torch.Tensor:
        values = torch.tensor([rng.uniform(-1, 1) for _ in range(9)], dtype=torch.float64)
        return torch.where(MASK, values, 0.0)

    log_probs = draw().requires_grad_()
    return PolicyTerms(log_probs, log_probs - draw(), draw(), MASK, SEQUENCE, 4)


@pytest.mark.parametrize("dual", [None, 1.5])
def test_clipped_loss(dual: float | None) -> None:
    t = terms()
    got = PPO(clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=dual).policy_loss(t)
    for i in range(9):
        a, ratio = float(t.advantages[i]), math.exp(float(t.log_ratio[i].detach()))
        expected = -min(a * ratio, a * min(max(ratio, 0.9), 1.3))
        if dual is not None and a < 0:
            expected = min(expected, -a * dual)
        assert float(got.per_token[i].detach()) == pytest.approx(expected)


def test_a_clipped_token_has_no_gradient() -> None:
    t = terms(3)
    loss = PPO(clip_ratio=0.05, clip_ratio_c=1.2).policy_loss(t)
    gradient = torch.autograd.grad(loss.per_token.sum(), t.log_probs)[0]
    assert loss.clipped is not None
    assert loss.clipped_lower is not None
    assert loss.clipped[MASK].any()
    assert not gradient[loss.clipped | loss.clipped_lower].any()


def rows_of(t: PolicyTerms) -> list[list[int]]:
    return [[i for i in range(9) if t.active[i] and t.sequence[i] == row] for row in range(4)]


def test_gspo_uses_the_ratio_of_the_row() -> None:
    t = terms()
    loss = GSPO(clip_ratio_low=0.05, clip_ratio_high=0.1).policy_loss(t)
    gradient = torch.autograd.grad(loss.per_token.sum(), t.log_probs)[0]
    for tokens in rows_of(t):
        for i in tokens:
            ratio = math.exp(sum(float(t.log_ratio[j].detach()) for j in tokens) / len(tokens))
            a = float(t.advantages[i])
            free, bounded = a * ratio, a * min(max(ratio, 0.95), 1.1)
            assert float(loss.per_token[i].detach()) == pytest.approx(-min(free, bounded))
            assert float(gradient[i]) == pytest.approx(-free if free <= bounded else 0.0)


def test_sapo_closes_a_gate_in_place_of_clipping() -> None:
    t = terms()
    algorithm = SAPO(temperature_pos=1.5, temperature_neg=2.0)
    loss = algorithm.policy_loss(t)
    gradient = torch.autograd.grad(loss.per_token.sum(), t.log_probs)[0]
    for i in range(9):
        a, ratio = float(t.advantages[i]), math.exp(float(t.log_ratio[i].detach()))
        temperature = 1.5 if a > 0 else 2.0
        gate = 1 / (1 + math.exp(-temperature * (ratio - 1)))
        assert float(loss.per_token[i].detach()) == pytest.approx(-a * gate * 4 / temperature)
        assert float(gradient[i]) == pytest.approx(-a * 4 * gate * (1 - gate) * ratio)
    slope = torch.autograd.grad(
        algorithm.policy_loss(replace(t, log_ratio=t.log_probs - t.log_probs.detach())).per_token.sum(), t.log_probs
    )
    torch.testing.assert_close(slope[0], -t.advantages)


def test_vespo_weighs_by_the_ratio_of_the_row() -> None:
    t = terms()
    loss = VESPO(k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0).policy_loss(t)
    gradient = torch.autograd.grad(loss.per_token.sum(), t.log_probs)[0]
    for tokens in rows_of(t):
        for i in tokens:
            a, w = float(t.advantages[i]), math.exp(sum(float(t.log_ratio[j].detach()) for j in tokens))
            k, decay = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
            weight = math.exp(decay) * w**k * math.exp(-decay * w)
            assert float(gradient[i]) == pytest.approx(-weight * a)


def test_rloo_of_sequences_is_the_clipped_loss_of_each_row() -> None:
    t = terms()
    advantages = torch.tensor([0.7, 0.0, -0.4, 0.9], dtype=torch.float64)[SEQUENCE]
    t = replace(t, advantages=torch.where(MASK, advantages, 0.0))
    algorithm = RLOO(ratio_of="sequence", clip_ratio=0.3, clip_ratio_c=None, loss_agg_mode="seq-mean-token-mean")
    weights = aggregation_weights(MASK, SEQUENCE, 4, "seq-mean-token-mean")
    value = (weights * algorithm.policy_loss(t).per_token).sum()
    ratio = torch.stack([t.log_ratio[rows].sum() for rows in rows_of(t) if rows]).exp()
    each = torch.stack([t.advantages[rows[0]] for rows in rows_of(t) if rows])
    expected = -torch.minimum(ratio * each, ratio.clamp(0.7, 1.3) * each).mean()
    gradients = [torch.autograd.grad(loss, t.log_probs, retain_graph=True)[0] for loss in (value, expected)]
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(*gradients)


def test_cispo_keeps_a_gradient_on_clipped_tokens() -> None:
    t = terms()
    loss = CISPO(clip_ratio_low=0.1, clip_ratio_high=0.1).policy_loss(t)
    gradient = torch.autograd.grad(loss.per_token.sum(), t.log_probs)[0]
    for i in range(9):
        weight = min(max(math.exp(float(t.log_ratio[i].detach())), 0.9), 1.1)
        assert float(gradient[i]) == pytest.approx(-weight * float(t.advantages[i]))


def test_gmpo_is_a_geometric_mean() -> None:
    t = terms()
    loss = GMPO(clip_ratio_low=0.2, clip_ratio_high=0.2).policy_loss(t)
    for tokens in rows_of(t):
        if not tokens:
            continue
        logs = []
        for i in tokens:
            d, a = float(t.log_ratio[i].detach()), float(t.advantages[i])
            bounded = min(max(d, -0.2), 0.2)
            logs.append(min(d, bounded) if a > 0 else max(d, bounded))
        mean = sum(float(t.advantages[i]) for i in tokens) / len(tokens)
        expected = -mean * math.exp(sum(logs) / len(tokens))
        assert [float(loss.per_token[i].detach()) for i in tokens] == pytest.approx([expected] * len(tokens))


def test_gpg_is_plain_reinforce() -> None:
    t = terms()
    assert torch.equal(GPG().policy_loss(t).per_token, -t.advantages * t.log_probs)


def test_value_loss_takes_the_worse_of_clipped_and_free() -> None:
    values = torch.tensor([0.0, 2.0, -1.0])
    loss, clipped = value_loss(values, torch.zeros(3), torch.tensor([1.0, 2.0, 1.0]), 0.5)
    assert loss.tolist() == pytest.approx([0.5, 0.5 * 1.5**2, 0.5 * 4.0])
    assert clipped.tolist() == [False, True, False]
    assert value_loss(values, torch.zeros(3), torch.ones(3), None)[0].tolist() == pytest.approx([0.5, 0.5, 2.0])
