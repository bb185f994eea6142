"""What each policy gradient makes of a whole batch: abstained rows, odd groups, NaN, and its own options."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms.support import GRADIENT, experience, loss_input, random_experience
from tests.properties import examples
from verl.algorithms import make_algorithm
from verl.algorithms.kl import adapted
from verl.batch import Batch
from verl.errors import ConfigError


@pytest.mark.parametrize("name", GRADIENT)
@pytest.mark.parametrize("seed", range(4))
def test_any_batch_gives_finite_columns_and_a_finite_gradient(name: str, seed: int) -> None:
    algorithm = make_algorithm(name)
    batch, metrics = algorithm.prepare(random_experience(seed, algorithm.greedy_baseline))
    assert all(math.isfinite(value) for value in metrics.values())
    assert batch.tensor("advantages").isfinite().all()
    assert None not in batch["reward"]
    leaf = torch.full((sum(batch.lengths("response_tokens")),), -1.0, dtype=torch.float64, requires_grad=True)
    loss = algorithm.compute_loss(loss_input(algorithm, batch, log_probs=leaf))
    gradient = torch.autograd.grad(loss.total, leaf)[0]
    assert gradient.isfinite().all()
    assert not gradient[batch.tensor("response_mask") == 0].any()
    assert all(math.isfinite(float(value)) for value in loss.metrics.values())


@pytest.mark.parametrize("name", GRADIENT)
def test_abstained_rows_change_nothing(name: str) -> None:
    algorithm = make_algorithm(name)
    everyone = random_experience(1, algorithm.greedy_baseline)
    scored = Counter(
        group for group, reward in zip(everyone["group"], everyone["reward"], strict=True) if reward is not None
    )
    everyone = everyone.filter([scored[group] != 1 for group in everyone["group"]])  # see the next test
    present = everyone.filter([reward is not None for reward in everyone["reward"]])
    assert len(present) < len(everyone)
    with_gaps, metrics = algorithm.prepare(everyone)
    without, clean = make_algorithm(name).prepare(present)
    assert with_gaps == without
    assert metrics["abstained"] > clean["abstained"] == 0


@pytest.mark.parametrize("name", GRADIENT)
def test_a_sample_that_is_left_alone_in_its_group_does_not_train_where_the_group_is_the_baseline(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = make_algorithm(name)
    groups, rewards = [*"aaaa", *"bb", "c"], [2.0, None, math.nan, math.inf, 1.0, 0.0, 3.0]
    columns = {"baseline": [False] * 7} if algorithm.greedy_baseline else {}
    prepared, metrics = algorithm.prepare(experience([2] * 7, groups, rewards, **columns))
    if algorithm.needs_groups:
        assert prepared["group"] == ["b", "b", "c"], "a group that was sampled as one stays"
        assert (metrics["abstained"], metrics["left_alone"]) == (3, 1)
        assert "1 of 7 samples are left out" in caplog.text
    else:
        assert prepared["group"] == ([] if algorithm.greedy_baseline else ["a", "b", "b", "c"])
        assert "left_alone" not in metrics
    alone, _ = algorithm.prepare(experience([2] * 4, [*"aaaa"], rewards[:4], **{k: v[:4] for k, v in columns.items()}))
    assert len(alone) == (not algorithm.needs_groups and not algorithm.greedy_baseline)


@pytest.mark.parametrize("missing", ["reward", "cost"])
def test_a_sample_alone_with_reward_and_cost_does_not_train_on_them(missing: str) -> None:
    batch = experience([2] * 3, [*"aaa"], [2.0, 1.0, 0.0], cost=[0.5, 0.25, 1.0])
    batch = batch.drop([missing]).add({missing: [1.0, None, None]})
    assert not len(make_algorithm("safe_rlhf").prepare(batch)[0])
    assert len(make_algorithm("safe_rlhf", baseline="critics").prepare(batch)[0]) == 1


@pytest.mark.parametrize("name", GRADIENT)
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_a_batch_whose_rewards_all_abstained_is_empty(name: str, bad: float | None) -> None:
    algorithm = make_algorithm(name, kl_in="loss")
    columns = {"baseline": [False, True]} if algorithm.greedy_baseline else {}
    batch, _ = algorithm.prepare(experience([2, 3], ["a", "a"], [bad, bad], **columns))
    assert len(batch) == 0
    assert "advantages" in batch
    nothing = torch.zeros(0, dtype=torch.float64)
    assert float(algorithm.compute_loss(loss_input(algorithm, batch, log_probs=nothing)).total) == 0


@pytest.mark.parametrize("name", GRADIENT)
def test_order_of_rows_does_not_matter(name: str) -> None:
    algorithm = make_algorithm(name)
    batch = random_experience(2, algorithm.greedy_baseline)
    order = list(reversed(range(len(batch))))
    forth = {row["id"]: row for row in algorithm.prepare(batch)[0]}
    back = {row["id"]: row for row in make_algorithm(name).prepare(batch.take(order))[0]}
    assert forth.keys() == back.keys()
    for id_, row in forth.items():
        assert row["advantages"] == pytest.approx(back[id_]["advantages"], abs=1e-12)


@pytest.mark.parametrize("name", [name for name in GRADIENT if make_algorithm(name).needs_groups])
def test_all_equal_rewards_give_no_gradient(name: str) -> None:
    batch = experience([2, 3, 1], ["a"] * 3, [0.1] * 3).drop(["cost"]).add({"cost": [0.3] * 3})
    batch, _ = make_algorithm(name).prepare(batch)
    assert not batch.tensor("advantages").any()


def test_a_row_without_written_tokens_counts_in_its_group_only() -> None:
    batch = experience([2, 0, 1], ["a"] * 3, [1.0, 4.0, -2.0]).drop(["response_mask"])
    batch = batch.add({"response_mask": [[1, 1], [], [0]]})
    algorithm = make_algorithm("rloo", loss_agg_mode="seq-mean-token-mean")
    done, _ = algorithm.prepare(batch)
    assert done["advantages"] == [[0.0, 0.0], [], [0.0]]  # 1 - (4 - 2) / 2
    assert algorithm.token_weights(done).tolist() == [0.5, 0.5, 0.0]
    cost = batch.drop(["cost"]).add({"cost": [0.0, 3.0, 3.0]})
    done, _ = make_algorithm("safe_rlhf", lambda_init=1.0, lambda_lr=0.0).prepare(cost)
    assert done["advantages"] == [[1.0, 1.0], [], [0.0]]  # reward 0 above its mean, cost 2 below


def test_results_are_stored_in_fp32_unless_the_batch_is_fp64() -> None:
    wide = experience([2, 3], ["a", "a"], [1.0, 0.0])
    ragged = ("log_probs", "rollout_log_probs", "ref_log_probs", "values", "cost_values")
    narrow = wide.drop(ragged).add({"values": [[0.0, 0.0], [0.0] * 3]})
    assert make_algorithm("grpo").prepare(wide)[0].tensor("advantages").dtype == torch.float64
    assert make_algorithm("grpo").prepare(narrow)[0].tensor("advantages").dtype == torch.float32


def test_token_rewards_take_the_place_of_the_outcome() -> None:
    batch = (
        experience([2, 1], ["a", "a"], [1.0, 0.0]).drop(["response_mask"]).add({"token_rewards": [[0.5, 2.0], [1.0]]})
    )
    done, _ = make_algorithm("rloo").prepare(batch)
    assert done["advantages"] == [[1.5, 1.5], [-1.5]]


def test_token_rewards_that_are_no_number_abstain_alone() -> None:
    batch = experience([1, 2, 2, 1, 1], [*"aabba"], [0.0] * 5).drop(["response_mask"])
    batch = batch.add({"token_rewards": [[1.0], [2.0, math.nan], [0.0, 1.0], [3.0], [2.0]]})
    for name in ("rloo", "ppo", "safe_rlhf"):
        algorithm = make_algorithm(name, **({"kl_in": "none"} if name == "ppo" else {}))
        done, metrics = algorithm.prepare(batch)
        assert metrics["abstained"] == 1 and done["id"] == [batch["id"][row] for row in (0, 2, 3, 4)]
        assert done.tensor("advantages").isfinite().all()
    assert make_algorithm("rloo").prepare(batch)[0]["advantages"] == [[-1.0], [-2.0, -2.0], [2.0], [1.0]]


def test_token_rewards_of_a_tool_are_its_callers() -> None:
    batch = experience([4, 3, 1], ["a"] * 3, [0.0] * 3).drop(["response_mask", "values"])
    batch = batch.add({"response_mask": [[0, 1, 0, 1], [1, 0, 0], [0]], "values": [[0.0] * 4, [0.0] * 3, [0.0]]})
    batch = batch.add({"token_rewards": [[1.0, 2.0, 4.0, 8.0], [0.0, 16.0, 32.0], [64.0]]})
    done, _ = make_algorithm("ppo", kl_in="none", gamma=1.0, lam=1.0).prepare(batch)
    assert (done["returns"][0][1], done["returns"][0][3], done["returns"][1][0]) == (15.0, 8.0, 48.0)
    done, _ = make_algorithm("rloo").prepare(batch)
    assert done["advantages"][1][0] == pytest.approx(48.0 - (15.0 + 64.0) / 2)


def test_kl_in_the_reward_and_the_adaptive_coefficient() -> None:
    batch = experience([2, 1], ["a", "b"], [1.0, 0.0]).drop(["response_mask"])
    algorithm = make_algorithm("rloo", kl_in="reward", kl_coef=0.5, kl_target=0.01, kl_horizon=10)
    done, metrics = algorithm.prepare(batch)
    kl = [
        [p - q for p, q in zip(*row, strict=True)]
        for row in zip(batch["log_probs"], batch["ref_log_probs"], strict=True)
    ]
    assert done["advantages"][0] == pytest.approx([1.0 - 0.5 * sum(kl[0])] * 2)
    mean = (sum(kl[0]) / 2 + kl[1][0]) / 2
    assert metrics["kl"] == pytest.approx(mean)
    assert metrics["kl_coef"] == 0.5
    error = min(max(mean / 0.01 - 1, -0.2), 0.2)
    assert algorithm.state_dict()["kl_coef"] == pytest.approx(0.5 * (1 + error * 2 / 10))


def test_the_coefficient_in_the_loss_is_the_one_that_is_reported() -> None:
    batch = experience([2, 1], ["a", "b"], [1.0, 0.0])
    algorithm = make_algorithm("grpo", kl_in="loss", kl_coef=0.5, kl_target=0.01, kl_horizon=10)
    done, metrics = algorithm.prepare(batch)
    assert done["kl_coef"] == [metrics["kl_coef"]] * 2 == [0.5] * 2
    assert algorithm.prepare(batch)[0]["kl_coef"] == [pytest.approx(0.5 * (1 + 0.2 * 2 / 10))] * 2


def test_without_a_target_the_coefficient_is_fixed() -> None:
    batch = experience([2, 1], ["a", "b"], [1.0, 0.0])
    algorithm = make_algorithm("grpo", kl_in="loss", kl_coef=0.01)
    assert algorithm.prepare(batch)[1]["kl"] != 0
    assert algorithm.state_dict() == {"kl_coef": 0.01}


def test_no_batch_changes_the_coefficient_by_more_than_a_fifth() -> None:
    assert adapted(1.0, 0.0, samples=50, target=0.1, horizon=10) == pytest.approx(0.8)
    assert adapted(0.8, 9.0, samples=5000, target=0.1, horizon=10) == pytest.approx(0.8 * 1.2)
    for options in ({"name": "ppo"}, {"name": "grpo", "kl_in": "loss", "kl_target": 0.1}):
        with pytest.raises(ConfigError, match="kl_coef=0 stays 0"):
            make_algorithm(options.pop("name"), kl_coef=0.0, **options)
    make_algorithm("ppo", kl_coef=0.0, kl_target=None)


def test_kl_in_the_loss_travels_with_its_coefficient() -> None:
    batch = experience([2, 1], ["a", "a"], [1.0, 1.0]).drop(["response_mask", "rollout_log_probs"])
    algorithm = make_algorithm("grpo", kl_in="loss", kl_coef=0.5, kl_estimator="k2")
    done, _ = algorithm.prepare(batch)
    leaf = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    other = make_algorithm("grpo", kl_in="loss", kl_coef=99.0, kl_estimator="k2")  # a worker's copy may be stale
    loss = other.compute_loss(loss_input(other, done, log_probs=leaf))
    distance = leaf.detach() - batch.tensor("ref_log_probs")
    assert float(loss.total.detach()) == pytest.approx(float(0.5 * (0.5 * distance**2).mean()))
    assert torch.allclose(torch.autograd.grad(loss.total, leaf)[0], 0.5 * distance / 3)


def test_entropy_bonus() -> None:
    algorithm = make_algorithm("grpo", entropy_coeff=0.1)
    batch, _ = algorithm.prepare(experience([2, 1], ["a", "a"], [1.0, 1.0]).drop(["response_mask"]))
    entropy = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    leaf = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    loss = algorithm.compute_loss(loss_input(algorithm, batch, log_probs=leaf, entropy=entropy))
    assert float(loss.total.detach()) == pytest.approx(-0.2)
    assert torch.autograd.grad(loss.total, entropy)[0].tolist() == pytest.approx([-0.1 / 3] * 3)


def test_masked_tokens_may_hold_anything() -> None:
    batch = experience([2, 2], ["a", "a"], [1.0, 0.0]).drop(["response_mask", "log_probs", "ref_log_probs"])
    batch = batch.add({"response_mask": [[1, 0], [1, 1]], "log_probs": [[-1.0, math.nan], [-1.0, -1.0]]})
    batch = batch.add({"ref_log_probs": [[-1.0, math.inf], [-1.0, -1.0]]})
    for name in ("grpo", "gspo", "gmpo", "gpg", "cispo"):
        for kl_in in ("reward", "loss"):
            algorithm = make_algorithm(name, kl_in=kl_in)
            done, _ = algorithm.prepare(batch)
            leaf = torch.tensor([-1.0, -math.inf, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
            loss = algorithm.compute_loss(loss_input(algorithm, done, log_probs=leaf)).total
            assert loss.isfinite()
            assert torch.autograd.grad(loss, leaf)[0].isfinite().all()


def test_gpg_counts_rewards_without_the_penalty() -> None:
    batch = experience([1] * 4, ["a", "a", "b", "b"], [1.0, 0.0, 0.0, 0.0]).drop(["response_mask"])
    free, _ = make_algorithm("gpg").prepare(batch)
    assert free.tensor("advantages").tolist() == [2.0, -2.0, 0.0, 0.0]
    penalised, _ = make_algorithm("gpg", kl_in="reward", kl_coef=1e-9).prepare(batch)
    assert penalised.tensor("advantages").tolist() == pytest.approx([2.0, -2.0, 0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("name", GRADIENT)
@pytest.mark.parametrize("moved", [1000.0, -1000.0])
def test_a_policy_that_has_moved_without_bound_gives_finite_numbers(name: str, moved: float) -> None:
    algorithm = make_algorithm(name)
    columns = {"baseline": [False, False, True]} if algorithm.greedy_baseline else {}
    batch, _ = algorithm.prepare(experience([3, 2, 1], ["a"] * 3, [1.0, 0.0, 0.5], **columns))
    leaf = (batch.tensor("log_probs") + moved).requires_grad_()
    loss = algorithm.compute_loss(loss_input(algorithm, batch, log_probs=leaf))
    assert loss.total.isfinite() and torch.autograd.grad(loss.total, leaf)[0].isfinite().all()


def test_ppo_values_and_returns() -> None:
    batch = experience([3, 2], ["a", "b"], [1.0, 0.0]).drop(["response_mask"])
    done, _ = make_algorithm("ppo", kl_in="none").prepare(batch)
    assert done["returns"][0] == pytest.approx([1.0] * 3)  # gamma = lambda = 1: the reward to go
    assert done.tensor("advantages").mean() == pytest.approx(0, abs=1e-12)
    assert done.tensor("advantages").var() == pytest.approx(1, abs=1e-6)


def test_remax_takes_the_greedy_reward_off() -> None:
    batch = experience(
        [2, 1, 1, 3, 1],
        ["a", "a", "b", "b", "c"],
        [1.0, 0.25, 1.0, None, 1.0],
        baseline=[False, True, False, True, False],
    ).drop(["response_mask"])
    done, metrics = make_algorithm("remax").prepare(batch)
    # b's greedy reward abstained and c has no greedy sample: without a baseline they do not train.
    assert done["group"] == ["a"]
    assert done["advantages"] == [[0.75, 0.75]]
    assert metrics["remax/without_baseline"] == 2
    assert metrics["remax/baseline_reward"] == 0.25


def test_remax_takes_the_greedy_token_rewards_off() -> None:
    batch = experience([2, 1, 1, 1], ["a", "a", "b", "b"], [0.0] * 4, baseline=[False, True] * 2)
    batch = batch.drop(["response_mask"]).add({"token_rewards": [[0.5, 0.5], [0.25], [1.0], [math.nan]]})
    done, metrics = make_algorithm("remax").prepare(batch)
    assert done["advantages"] == [[0.75, 0.25]]
    assert (metrics["remax/baseline_reward"], metrics["remax/without_baseline"]) == (0.25, 1)


def test_dapo_keeps_groups_with_a_signal() -> None:
    batch = experience([1] * 8, ["a", "a", "b", "b", "c", "d", "d", "d"], [1.0, 0.0, 1.0, 1.0, 0.5, None, 0.0, 1.0])
    assert make_algorithm("dapo").keep(batch) == [True, True, False, False, False, False, True, True]
    assert make_algorithm("dapo", filter_groups=False).keep(batch) is None
    acc = batch.add({"acc": [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]})
    assert make_algorithm("dapo", filter_metric="acc").keep(acc) == [
        False,
        False,
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert make_algorithm("grpo").keep(batch) is None
    tokens = batch.add({"token_rewards": [[1.0], [math.nan], *[[0.0]] * 6]})
    assert make_algorithm("dapo").keep(tokens) == [False] * 6 + [True, True]


@pytest.mark.parametrize("name", ["dapo", "gspo", "gmpo", "cispo", "sapo"])
def test_the_punishment_may_be_what_differs_in_a_group(name: str) -> None:
    """Whatever the loss, dynamic sampling and the punishment go with it."""
    batch = experience([4, 1, 1, 1], ["a", "a", "b", "b"], [1.0] * 4).drop(["response_mask"])
    options = {"filter_groups": True, "overlong_length": 4, "overlong_buffer": 2}
    assert make_algorithm(name, **options).keep(batch) == [False] * 4
    algorithm = make_algorithm(name, filter_metric="outcome", **options)
    assert algorithm.keep(batch) == [True, True, False, False]
    advantages = algorithm.prepare(batch)[0]["advantages"]
    assert max(advantages[0]) < 0 < max(advantages[1]) and advantages[2:] == [[0.0], [0.0]]
    assert make_algorithm(name).keep(batch) is None or name == "dapo"


def test_dapo_punishes_overlong_responses() -> None:
    batch = experience([6, 8, 9, 10, 12], ["a"] * 5, [1.0] * 5)
    algorithm = make_algorithm("dapo", overlong_length=10, overlong_buffer=4, overlong_penalty=2.0)
    assert algorithm.outcome_rewards(batch).tolist() == [1.0, 0.0, -0.5, -1.0, -1.0]  # type: ignore[attr-defined]


def test_dapo_punishes_overlong_responses_with_token_rewards_too() -> None:
    batch = experience([2, 6], ["a", "a"], [1.0, 1.0]).drop(["response_mask"])
    options = {"overlong_length": 6, "overlong_buffer": 3, "norm_adv_by_std": False}
    rewarded, _ = make_algorithm("dapo", **options).prepare(batch)
    by_token = batch.add({"token_rewards": [[0.0, 1.0], [1.0, *[0.0] * 5]]})
    assert make_algorithm("dapo", **options).prepare(by_token)[0]["advantages"] == rewarded["advantages"]
    assert rewarded["advantages"] == [[0.5] * 2, [-0.5] * 6]


def safe(costs: list[float | None], **options: float) -> tuple[Batch, dict[str, float], object]:
    batch = experience([1] * len(costs), ["a"] * len(costs), [1.0, 0.0] * (len(costs) // 2)).drop(
        ["cost", "response_mask"]
    )
    algorithm = make_algorithm("safe_rlhf", **options)
    done, metrics = algorithm.prepare(batch.add({"cost": costs}))
    return done, metrics, algorithm


def test_safe_rlhf_combines_reward_and_cost() -> None:
    done, metrics, _ = safe([1.0, 0.0], lambda_lr=0.0, lambda_init=3.0)
    # reward advantages are 0.5 and -0.5, cost advantages too: (0.5 - 3 * 0.5) / 4
    assert done.tensor("advantages").tolist() == [-0.25, 0.25]
    assert metrics["cost/mean"] == 0.5
    free, metrics, _ = safe([1.0, 0.0], lambda_lr=0.0, lambda_init=0.0)
    assert free.tensor("advantages").tolist() == [0.5, -0.5]
    assert metrics["lambda"] == 0.0


def test_safe_rlhf_raises_lambda_above_the_limit() -> None:
    _, metrics, _ = safe([1.0, 0.0], cost_limit=0.1, lambda_lr=0.5, lambda_kp=0.0)
    assert metrics["lambda"] == pytest.approx(math.exp(0.5 * 0.4))
    _, metrics, _ = safe([1.0, 0.0], cost_limit=0.9, lambda_lr=0.5, lambda_kp=2.0)
    assert metrics["lambda"] == pytest.approx(math.exp(-2.5 * 0.4))
    _, metrics, _ = safe([1.0, 0.0], cost_limit=0.1, lambda_delay=1)
    assert metrics["lambda"] == 1.0


def test_safe_rlhf_rows_without_a_cost_abstain() -> None:
    done, metrics, _ = safe([1.0, None, 0.0, math.nan])
    assert len(done) == 2
    assert metrics["abstained"] == 2
    _, metrics, _ = safe([None, math.nan])
    assert metrics["lambda"] == 1.0


def test_safe_rlhf_two_critics() -> None:
    batch = experience([2, 3], ["a", "b"], [1.0, 0.0]).drop(["response_mask"])
    algorithm = make_algorithm("safe_rlhf", baseline="critics", lambda_lr=0.0)
    done, _ = algorithm.prepare(batch)
    assert done["cost_returns"][0] == pytest.approx([batch["cost"][0]] * 2)
    for role in ("critic", "cost_critic"):
        objective = algorithm.objective(role)
        values = torch.zeros(5, dtype=torch.float64, requires_grad=True)
        loss = objective.compute_loss(loss_input(objective, done, values=values))
        assert torch.autograd.grad(loss.total, values)[0].any()


@examples(60)
@given(
    stream=st.lists(
        st.lists(st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)), min_size=2, max_size=2),
        max_size=12,
    ),
    lr=st.floats(1e-3, 10),
    kp=st.sampled_from([0.0, 10.0]),
    window=st.integers(1, 5),
)
def test_lambda_stays_in_its_bounds_for_any_costs(
    stream: list[list[float | None]], lr: float, kp: float, window: int
) -> None:
    algorithm = make_algorithm(
        "safe_rlhf", lambda_lr=lr, lambda_kp=kp, lambda_window=window, lambda_min=0.01, lambda_max=10.0
    )
    for costs in stream:
        before = algorithm.state_dict()
        batch = experience([1, 1], ["a", "a"], [1.0, 0.0]).drop(["cost"]).add({"cost": costs})
        _, metrics = algorithm.prepare(batch)
        assert 0.01 <= metrics["lambda"] <= 10.0
        if not any(cost is not None and math.isfinite(cost) for cost in costs):
            assert metrics["lambda"] == before["lambda"]


def test_safe_rlhf_resumes_exactly() -> None:
    costs = [0.3, 0.9], [0.1, 0.2], [0.8, 0.7]
    batches = [experience([1, 1], ["a", "a"], [1.0, 0.0]).drop(["cost"]).add({"cost": cost}) for cost in costs]
    whole = make_algorithm("safe_rlhf", lambda_window=3, lambda_delay=1)
    for batch in batches[:2]:
        whole.prepare(batch)
    resumed = make_algorithm("safe_rlhf", lambda_window=3, lambda_delay=1)
    resumed.load_state_dict(whole.state_dict())
    assert resumed.prepare(batches[2]) == whole.prepare(batches[2])
