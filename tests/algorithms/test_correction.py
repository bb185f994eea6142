"""Off-policy correction against loops, its edge cases, and its way through `prepare`."""

from __future__ import annotations

import math

import pytest
import torch

from tests.algorithms.support import experience, loss_input
from verl.algorithms import make_algorithm
from verl.algorithms.correction import LogRatio, Rejection, accepted, importance_weights, mismatch
from verl.algorithms.loss_terms import combine_metrics
from verl.algorithms.responses import Responses
from verl.errors import ConfigError, DataError

ROWS = [[0.5, -1.0, 0.2], [], [1.5], [-0.1, 0.0]]


def log_ratio(rows: list[list[float]] = ROWS) -> LogRatio:
    lengths = [len(row) for row in rows]
    batch = experience(lengths, ["g"] * len(rows), [1.0] * len(rows)).drop(["response_mask"])
    flat = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
    return LogRatio(Responses(batch), flat, torch.zeros_like(flat))


def test_token_weights_are_truncated_or_masked() -> None:
    raw = [math.exp(x) for row in ROWS for x in row]
    assert importance_weights(log_ratio(), "token", 2.0).tolist() == pytest.approx([min(w, 2.0) for w in raw])
    masked = importance_weights(log_ratio(), "token", 2.0, lower=0.5)
    assert masked.tolist() == pytest.approx([w if 0.5 <= w <= 2.0 else 0.0 for w in raw])


def test_sequence_weights_are_products_over_the_row() -> None:
    got = importance_weights(log_ratio(), "sequence", 2.0)
    assert got.tolist() == pytest.approx([min(math.exp(sum(row)), 2.0) for row in ROWS for _ in row])


def test_normalised_weights_have_mean_one() -> None:
    token = importance_weights(log_ratio(), "token", 2.0, normalize=True)
    assert token.mean() == pytest.approx(1.0)
    sequence = importance_weights(log_ratio(), "sequence", 2.0, normalize=True)
    assert (sequence[0] + sequence[3] + sequence[4]) / 3 == pytest.approx(1.0)


@pytest.mark.parametrize("rule", Rejection.__args__)  # type: ignore[attr-defined]
def test_rejection(rule: Rejection) -> None:
    level, kind = rule.rsplit("_", 1)
    formula = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}[kind]
    reduce = {"token": None, "seq_sum": sum, "seq_mean": lambda v: sum(v) / len(v), "seq_max": max}[level]
    low, high = (math.log(0.8), math.log(1.6)) if kind == "k1" else (-math.inf, 0.15)
    expected = []
    for row in ROWS:
        values = [formula(d) for d in row]
        values = values if reduce is None or not row else [reduce(values)] * len(row)
        expected += [low <= value <= high for value in values]
    bounds = (1.6, 0.8) if kind == "k1" else (0.15, None)
    assert accepted(log_ratio(), rule, *bounds).tolist() == expected
    assert True in expected
    assert False in expected


def test_rejection_bounds_are_checked() -> None:
    with pytest.raises(ConfigError, match="lower <= upper"):
        accepted(log_ratio(), "token_k1", 0.5, 0.9)
    with pytest.raises(ConfigError, match="upper bound only"):
        accepted(log_ratio(), "token_k3", 0.5, 0.1)


def test_mismatch() -> None:
    flat = [x for row in ROWS for x in row]
    weights = [math.exp(x) for x in flat]
    got = mismatch(log_ratio())
    assert got["mismatch/kl"] == pytest.approx(-sum(flat) / len(flat))
    assert got["mismatch/log_ratio/max"] == 1.5
    assert got["mismatch/ess"] == pytest.approx(sum(weights) ** 2 / len(flat) / sum(w * w for w in weights))
    assert got["mismatch/nonfinite"] == 0


def test_a_token_that_is_not_finite_counts_as_out_of_bounds() -> None:
    broken = log_ratio([[0.1, math.nan], [math.inf, 0.2]])
    assert importance_weights(broken, "token", 2.0).tolist() == pytest.approx([math.exp(0.1), 0.0, 0.0, math.exp(0.2)])
    assert accepted(broken, "token_k3", 1.0).tolist() == [True, False, False, True]
    got = mismatch(broken)
    assert got["mismatch/nonfinite"] == 2
    assert all(map(math.isfinite, got.values()))


def test_nothing_to_measure() -> None:
    got = mismatch(log_ratio([[], []]))
    assert got["mismatch/ess"] == 1.0
    assert importance_weights(log_ratio([[], []]), "token", 2.0).shape == (0,)


def test_bounds_that_leave_no_weight_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout_is_lower=3.0 is above rollout_is_threshold=2.0"):
        make_algorithm("grpo", rollout_is_lower=3.0)
    make_algorithm("grpo", rollout_is_lower=0.5)


def test_prepare_corrects_only_where_both_numbers_are_there() -> None:
    both = experience([3, 2], ["g", "g"], [1.0, 0.0])
    batch, metrics = make_algorithm("grpo").prepare(both)
    assert "rollout_is_weights" in batch
    assert 0 < metrics["mismatch/ess"] <= 1
    for missing in ("log_probs", "rollout_log_probs"):
        batch, metrics = make_algorithm("grpo").prepare(both.drop([missing]))
        assert "rollout_is_weights" not in batch
        assert "mismatch/ess" not in metrics


def test_equal_numbers_change_nothing() -> None:
    both = experience([3, 2], ["g", "g"], [1.0, 0.0])
    same = both.drop(["rollout_log_probs"]).add({"rollout_log_probs": both.arrow("log_probs")})
    batch, metrics = make_algorithm("grpo").prepare(same)
    assert set(batch.tensor("rollout_is_weights").tolist()) <= {0.0, 1.0}  # 0 on tokens of a tool
    assert metrics["mismatch/ess"] == 1.0
    assert metrics["mismatch/kl"] == 0.0


def test_rejected_tokens_leave_the_loss_but_not_the_reward() -> None:
    batch = experience([3, 2, 4], ["g", "g", "g"], [1.0, 0.0, 0.0])
    algorithm = make_algorithm("ppo", kl_in="none", rollout_rs="token_k1", rollout_rs_threshold=1.5)
    done, metrics = algorithm.prepare(batch)
    distance = (batch.tensor("log_probs") - batch.tensor("rollout_log_probs")).abs()
    written = batch.tensor("response_mask") != 0
    dropped = ~written | (distance > math.log(1.5))
    assert metrics["mismatch/rejected"] == pytest.approx(float((written & dropped).sum() / written.sum()))
    assert written[dropped].any()
    assert torch.equal(done.tensor("loss_mask") == 0, dropped)
    assert not algorithm.token_weights(done)[dropped].any()
    free, _ = make_algorithm("ppo", kl_in="none").prepare(batch)
    assert torch.equal(free.tensor("returns"), done.tensor("returns"))
    masked, _ = algorithm.prepare(batch.add({"loss_mask": [[0, 0, 0], [1, 1], [1, 1, 1, 1]]}))
    assert masked["loss_mask"] == [[0, 0, 0], *done["loss_mask"][1:]]


def test_metrics_are_means_over_the_tokens_that_stay() -> None:
    batch = experience([3, 2, 4], ["g", "g", "g"], [1.0, 0.0, 0.0])
    algorithm = make_algorithm("ppo", kl_in="none", rollout_rs="token_k1", rollout_rs_threshold=1.5)
    done, _ = algorithm.prepare(batch)
    stay = done.tensor("loss_mask") != 0
    assert 0 < stay.sum() < (batch.tensor("response_mask") != 0).sum()
    now, entropy = batch.tensor("log_probs") - 0.5, torch.full((9,), 2.0, dtype=torch.float64)
    parts = [loss_input(algorithm, done, rows, log_probs=now, entropy=entropy) for rows in ([0, 1], [2])]
    got = combine_metrics([algorithm.compute_loss(x).metrics for x in parts])
    assert got["policy/kl"] == pytest.approx(0.5) and got["policy/entropy"] == pytest.approx(2.0)
    critic = algorithm.objective("critic")
    values = [loss_input(critic, done, rows, values=entropy) for rows in ([0, 1], [2])]
    assert combine_metrics([critic.compute_loss(x).metrics for x in values])["critic/value_mean"] == pytest.approx(2.0)
    unmeasured = done.drop(["rollout_log_probs"]).add({"rollout_log_probs": (now + 0.25, done.lengths("log_probs"))})
    parts = [loss_input(algorithm, unmeasured, rows, log_probs=now) for rows in ([0], [1, 2])]
    got = combine_metrics([algorithm.compute_loss(x).metrics for x in parts])
    assert got["mismatch/kl"] == pytest.approx(0.25)


def test_importance_weights_scale_the_loss() -> None:
    algorithm, plain = make_algorithm("gpg"), make_algorithm("gpg", rollout_is=None)
    batch = experience([3, 2], ["g", "g"], [1.0, 0.0])
    done, base = algorithm.prepare(batch)[0], plain.prepare(batch)[0]
    leaf = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    weighted = torch.autograd.grad(algorithm.compute_loss(loss_input(algorithm, done, log_probs=leaf)).total, leaf)[0]
    free = torch.autograd.grad(plain.compute_loss(loss_input(plain, base, log_probs=leaf)).total, leaf)[0]
    assert torch.allclose(weighted, free * done.tensor("rollout_is_weights"))


def test_the_ratio_may_be_to_the_engines_own_log_probs() -> None:
    """No weights, and no log-probs of the trainer: the ratio alone tells the policy from the one that sampled."""
    batch = experience([2, 3], ["a", "a"], [1.0, 0.0])
    algorithm = make_algorithm("grpo", rollout_is="ratio")
    done, _ = algorithm.prepare(batch)
    assert done["old_log_probs"] == batch["rollout_log_probs"] != batch["log_probs"]
    assert "rollout_is_weights" not in done
    assert algorithm.keeps_old_log_probs and not algorithm.needs_old_log_probs
    with pytest.raises(DataError, match="no column 'rollout_log_probs'"):
        algorithm.prepare(batch.drop(["rollout_log_probs"]))
    with pytest.raises(ConfigError, match="rollout_rs reads the trainer's log-probs"):
        make_algorithm("grpo", rollout_is="ratio", rollout_rs="token_k1")
    with pytest.raises(ConfigError, match="its loss has no ratio"):
        make_algorithm("gpg", rollout_is="ratio")
    for name in ("sapo", "vespo"):  # which clip none, and have one
        assert make_algorithm(name, rollout_is="ratio").keeps_old_log_probs


def test_only_what_is_exponentiated_is_bounded() -> None:
    measured = mismatch(log_ratio([[-60.0, 0.0]]))
    assert measured["mismatch/kl"] == pytest.approx(30.0)
    assert measured["mismatch/k3"] == pytest.approx((60 - 1) / 2)
    assert accepted(log_ratio([[60.0, -50.0], [1.0]]), "seq_sum_k1", 3.0).tolist() == [False, False, True]
    assert math.isfinite(mismatch(log_ratio([[800.0]]))["mismatch/k3"])
