"""Estimators against loops that follow the papers' formulas, and their edge cases."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
import torch

from tests.algorithms.support import experience
from verl.algorithms import Experience, make_algorithm
from verl.algorithms import advantages as adv
from verl.algorithms.episodes import Episodes
from verl.algorithms.responses import Responses
from verl.batch import Batch

REWARDS = [1.0, 0.0, 0.5, 0.5, 0.5, -2.0, 0.25, 1.0, 0.0]
GROUPS = [0, 0, 1, 1, 1, 2, 0, 3, 3]


def by_group() -> dict[int, list[float]]:
    members: dict[int, list[float]] = {}
    for reward, group in zip(REWARDS, GROUPS, strict=True):
        members.setdefault(group, []).append(reward)
    return members


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(GROUPS)


def advantages(
    name: str, rewards: torch.Tensor, groups: torch.Tensor, lengths: Sequence[int] = (), **options: Any
) -> torch.Tensor:
    """An algorithm's advantages `[S]` of rows with these outcomes; NaN for one without a token."""
    lengths = [*lengths] or [1] * len(rewards)
    batch = Batch.from_columns({
        "response_tokens": pa.array([[1] * length for length in lengths], pa.large_list(pa.int64())),
        "reward": pa.array(rewards.tolist(), pa.float64()),
        "group": pa.array([str(group) for group in groups.tolist()], pa.string()),
    })  # fmt: skip
    episodes = Episodes(batch)
    nothing = torch.zeros(sum(lengths), dtype=torch.float64)
    e = Experience(batch, episodes.responses, nothing, rewards, nothing, episodes)
    of_tokens: torch.Tensor = make_algorithm(name, **options).estimate(e)["advantages"]  # type: ignore[attr-defined]
    of_rows = torch.full((len(rewards),), math.nan, dtype=torch.float64)
    of_rows[episodes.responses.sequence] = of_tokens
    return of_rows


@pytest.mark.parametrize("norm", [True, False])
def test_grpo(norm: bool) -> None:
    expected = []
    for reward, group in zip(REWARDS, GROUPS, strict=True):
        others = by_group()[group]
        mean, std = (statistics.mean(others), statistics.stdev(others)) if len(others) > 1 else (0.0, 1.0)
        expected.append((reward - mean) / (std + 1e-6) if norm else reward - mean)
    assert adv.grpo(*tensors(), norm).tolist() == pytest.approx(expected, abs=1e-12)


def test_grpo_by_the_deviation_of_all_rewards() -> None:
    deviation, expected = statistics.stdev(REWARDS), []
    for reward, group in zip(REWARDS, GROUPS, strict=True):
        others = by_group()[group]
        mean = statistics.mean(others) if len(others) > 1 else 0.0
        expected.append((reward - mean) / (deviation + 1e-4))
    assert adv.grpo(*tensors(), "batch", 1e-4).tolist() == pytest.approx(expected, abs=1e-12)


def test_rloo_leaves_one_out() -> None:
    expected = []
    for row, (reward, group) in enumerate(zip(REWARDS, GROUPS, strict=True)):
        rest = [r for i, (r, g) in enumerate(zip(REWARDS, GROUPS, strict=True)) if g == group and i != row]
        expected.append(reward - (statistics.mean(rest) if rest else 0.0))
    assert advantages("rloo", *tensors()).tolist() == pytest.approx(expected, abs=1e-12)


def test_opo_weights_by_length() -> None:
    lengths = [3, 1, 2, 2, 5, 4, 0, 7, 1]
    expected = []
    for reward, group in zip(REWARDS, GROUPS, strict=True):
        rows = [i for i, g in enumerate(GROUPS) if g == group]
        baseline = sum(lengths[i] * REWARDS[i] for i in rows) / sum(lengths[i] for i in rows) if len(rows) > 1 else 0.0
        expected.append(reward - baseline)
    got = advantages("opo", *tensors(), lengths)
    assert got[6].isnan() and lengths[6] == 0
    assert got.nan_to_num().tolist() == pytest.approx([*expected[:6], 0.0, *expected[7:]], abs=1e-12)


def test_gpg_scales_by_the_share_of_rewards_other_than_zero() -> None:
    nonzero = sum(r != 0 for r in REWARDS)
    centred = adv.group_centred(*tensors())
    assert torch.allclose(advantages("gpg", *tensors(), f_norm=2.0), centred * len(REWARDS) / nonzero / 2.0)
    assert not advantages("gpg", torch.zeros(3, dtype=torch.float64), torch.tensor([0, 0, 1])).any()


def test_passk_rewards_only_the_best_lead() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5, 2.0, 2.0, 5.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1, 1, 2])
    assert advantages("grpo_passk", rewards, groups, norm_adv_by_std=False).tolist() == [0.5, 0, 0, 0, 0, 0]
    std = statistics.stdev([1.0, 0.0, 0.5])
    assert advantages("grpo_passk", rewards, groups).tolist() == pytest.approx([0.5 / (std + 1e-6), 0, 0, 0, 0, 0])


@pytest.mark.parametrize("name", ["grpo", "rloo", "gpg"])
def test_equal_rewards_have_no_signal_and_a_lone_sample_has_no_baseline(name: str) -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.7], dtype=torch.float64)
    got = advantages(name, rewards, torch.tensor([0, 0, 0, 1]))
    assert got[:3].tolist() == [0.0, 0.0, 0.0]
    assert got[3] == pytest.approx(0.7, abs=1e-6)


def test_no_rows() -> None:
    nothing, groups = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    for name in ("grpo", "rloo", "gpg", "grpo_passk", "opo"):
        assert advantages(name, nothing, groups).shape == (0,)


def ragged(seed: int) -> tuple[Responses, list[list[float]], list[list[float]]]:
    rng = random.Random(seed)
    lengths = [4, 1, 0, 6, 2]
    responses = Responses(experience(lengths, ["g"] * 5, [1.0] * 5, seed))
    rewards = [[rng.uniform(-1, 1) for _ in range(n)] for n in lengths]
    values = [[rng.uniform(-1, 1) for _ in range(n)] for n in lengths]
    return responses, rewards, values


def flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


@pytest.mark.parametrize("seed", range(5))
def test_gae_is_the_sum_of_discounted_errors_over_written_tokens(seed: int) -> None:
    gamma, lam = 0.9, 0.7
    responses, rewards, values = ragged(seed)
    written = responses.batch["response_mask"]
    got, returns = adv.gae(flat(rewards), flat(values), responses, gamma, lam)
    expected = []
    for r, v, m in zip(rewards, values, written, strict=True):
        places = [t for t in range(len(r)) if m[t]]
        errors = [
            r[t] + gamma * (v[places[i + 1]] if i + 1 < len(places) else 0.0) - v[t] for i, t in enumerate(places)
        ]
        for i in range(len(places)):
            expected.append(sum((gamma * lam) ** (j - i) * errors[j] for j in range(i, len(places))))
    assert got[responses.written].tolist() == pytest.approx(expected, abs=1e-12)
    assert torch.equal(returns, got + flat(values))


@pytest.mark.parametrize("seed", range(5))
def test_discounted_returns(seed: int) -> None:
    responses, rewards, _ = ragged(seed)
    got = adv.discounted_returns(flat(rewards), responses, 0.8)
    expected = []
    for r, m in zip(rewards, responses.batch["response_mask"], strict=True):
        for t in range(len(r)):
            later = [r[s] for s in range(t, len(r)) if m[s]]
            expected.append(sum(0.8**i * x for i, x in enumerate(later)) if m[t] else 0.0)
    assert got.tolist() == pytest.approx(expected, abs=1e-12)


def test_whiten() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 100.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    got = adv.whiten(values, mask)[mask]
    assert got.mean() == pytest.approx(0, abs=1e-12)
    assert got.var() == pytest.approx(1, abs=1e-6)
    assert adv.whiten(values, torch.tensor([False, True, False, False]))[1] == 0.0
    assert torch.equal(adv.whiten(values, torch.zeros(4, dtype=torch.bool)), values)


def test_the_reward_stands_at_the_last_token_that_the_policy_wrote() -> None:
    batch = experience([3, 2, 0, 2], ["g"] * 4, [1.0] * 4).drop(["response_mask"])
    responses = Responses(batch.add({"response_mask": [[1, 1, 0], [1, 1], [], [0, 0]]}))
    rewards = torch.tensor([5.0, 6.0, 7.0, 8.0], dtype=torch.float64)
    assert responses.at_last_token(rewards).tolist() == [0, 5, 0, 0, 6, 0, 0]
    assert not math.isnan(float(responses.at_last_token(torch.full((4,), 1.0)).sum()))
