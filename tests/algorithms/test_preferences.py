"""SFT, reward models, the preference losses and KTO against loops over the formulas."""

from __future__ import annotations

import math

import pytest
import torch

from tests.algorithms.support import OFFLINE, experience, loss_input, preferences, prepared
from verl.algorithms import make_algorithm
from verl.algorithms.loss_terms import combine_metrics
from verl.batch import Batch
from verl.errors import ConfigError, DataError

LENGTHS = [3, 2, 1, 4, 2, 2]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def policy(batch: Batch, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return -torch.rand(sum(batch.lengths("response_tokens")), dtype=torch.float64) - 0.1


def sequence_sums(batch: Batch, flat: torch.Tensor) -> list[float]:
    parts = flat.split(batch.lengths("response_tokens"))
    masks = batch.tensor("response_mask").split(batch.lengths("response_tokens"))
    return [float((part * mask).sum()) for part, mask in zip(parts, masks, strict=True)]


def pairs_of(batch: Batch, scores: list[float]) -> list[tuple[float, float]]:
    found = []
    for rows in batch.group_indices():
        chosen = next(row for row in rows if batch["label"][row] == 1.0)
        rejected = next(row for row in rows if batch["label"][row] == 0.0)
        found.append((scores[chosen], scores[rejected]))
    return found


def loss_of(name: str, batch: Batch, flat: torch.Tensor, **options: object) -> float:
    algorithm = make_algorithm(name, **options)
    done, _ = algorithm.prepare(batch)
    return float(algorithm.compute_loss(loss_input(algorithm, done, log_probs=flat)).total)


SCORED = {
    "group": ["a", "a", "a", "b", "b", "c", "c"],
    "reward": [1.0, 3.0, 2.0, 5.0, 5.0, math.nan, 1.0],
    "prompt_tokens": [[1], [1], [1], [2], [2], [3], [3]],
    "response_tokens": [[4]] * 7,
}


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo"])
def test_pairs_are_the_best_and_the_worst_sample_of_a_prompt(name: str) -> None:
    algorithm = make_algorithm(name)
    batch = algorithm.extend(Batch.from_columns(SCORED))
    assert (batch["group"], batch["reward"], batch["label"]) == (["a", "a"], [1.0, 3.0], [0.0, 1.0])
    labelled = Batch.from_columns({**SCORED, "label": [0.0, 1.0] * 3 + [0.0]})
    assert algorithm.extend(labelled) is labelled
    with pytest.raises(DataError, match=r"no pairs among 2 samples: .* at least two a prompt"):
        algorithm.extend(Batch.from_columns({key: value[3:5] for key, value in SCORED.items()}))


def test_labels_of_kto_are_by_the_mean_of_a_prompt() -> None:
    batch = make_algorithm("kto").extend(Batch.from_columns(SCORED))
    labels = [label for label, added in zip(batch["label"], batch["mismatched"], strict=True) if not added]
    assert labels[:2] == [0.0, 1.0] and all(map(math.isnan, labels[2:]))  # at the mean, of equals, abstained, alone
    single = Batch.from_columns({**SCORED, "group": list("abcdefg")})  # the mean is 17 / 6
    labels = [label for label in make_algorithm("kto").extend(single)["label"] if label is not None]
    assert [label for label in labels if not math.isnan(label)] == [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("seed", range(3))
def test_dpo_family(seed: int) -> None:
    batch = preferences(LENGTHS, seed)
    flat = policy(batch, seed)
    ratios = sequence_sums(batch, flat - batch.tensor("ref_log_probs"))
    tokens = [max(sum(mask), 1) for mask in batch["response_mask"]]
    margins = [0.3 * (c - r) for c, r in pairs_of(batch, ratios)]
    mean = sum(-math.log(sigmoid(m)) for m in margins) / 3
    assert loss_of("dpo", batch, flat, beta=0.3) == pytest.approx(mean)
    hinge = sum(max(0.0, 1 - m) for m in margins) / 3
    assert loss_of("dpo", batch, flat, beta=0.3, loss_type="hinge") == pytest.approx(hinge)
    robust = sum((-0.8 * math.log(sigmoid(m)) + 0.2 * math.log(sigmoid(-m))) / 0.6 for m in margins) / 3
    assert loss_of("dpo", batch, flat, beta=0.3, label_smoothing=0.2) == pytest.approx(robust)
    averaged = pairs_of(batch, [x / n for x, n in zip(ratios, tokens, strict=True)])
    ipo = sum((c - r - 1 / 0.6) ** 2 for c, r in averaged) / 3
    assert loss_of("ipo", batch, flat, beta=0.3) == pytest.approx(ipo)

    means = pairs_of(batch, [x / n for x, n in zip(sequence_sums(batch, flat), tokens, strict=True)])
    simpo = sum(-math.log(sigmoid(2.0 * (c - r) - 0.5)) for c, r in means) / 3
    assert loss_of("simpo", batch, flat) == pytest.approx(simpo)


def log_sigmoid(x: float) -> float:
    return -math.log(1 + math.exp(-x))


def exo(a: float, b: float) -> float:
    """KL of the policy's two chances, a softmax over a and b, to those of the labels."""
    chances = [math.exp(x) / (math.exp(a) + math.exp(b)) for x in (a, b)]
    return sum(p * math.log(p / q) for p, q in zip(chances, (0.9, 0.1), strict=True))


def discopop(a: float, b: float) -> float:
    share = sigmoid((a - b) / 0.2)
    return (1 - share) * -log_sigmoid(a - b) + share * math.exp(-(a - b))


#: The papers' losses of a pair from beta times the log-ratios of chosen and rejected; beta is 0.3.
PAPERS = {
    "exo_pair": (exo, {"label_smoothing": 0.1}),
    "nca_pair": (lambda a, b: -log_sigmoid(a) - 0.5 * log_sigmoid(-a) - 0.5 * log_sigmoid(-b), {}),
    "bco_pair": (lambda a, b: -log_sigmoid(a) - log_sigmoid(-b), {}),
    "sppo_hard": (lambda a, b: (a / 0.3 - 1 / 0.6) ** 2 + (b / 0.3 + 1 / 0.6) ** 2, {}),
    "apo_zero": (lambda a, b: (1 - sigmoid(a)) + sigmoid(b), {}),
    "apo_down": (lambda a, b: sigmoid(a) + (1 - sigmoid(a - b)), {}),
    "discopop": (discopop, {"discopop_tau": 0.2}),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss_type", PAPERS)
def test_losses_of_pairs_are_their_papers(loss_type: str, seed: int) -> None:
    formula, options = PAPERS[loss_type]
    batch = preferences(LENGTHS, seed)
    flat = policy(batch, seed)
    ratios = pairs_of(batch, sequence_sums(batch, flat - batch.tensor("ref_log_probs")))
    expected = sum(formula(0.3 * c, 0.3 * r) for c, r in ratios) / 3
    assert loss_of("dpo", batch, flat, beta=0.3, loss_type=loss_type, **options) == pytest.approx(expected)


def test_dpo_of_log_ratios_per_token() -> None:
    batch = preferences(LENGTHS)
    flat = policy(batch)
    tokens = [max(sum(mask), 1) for mask in batch["response_mask"]]
    sums = sequence_sums(batch, flat - batch.tensor("ref_log_probs"))
    pairs = pairs_of(batch, [x / n for x, n in zip(sums, tokens, strict=True)])
    expected = sum(-log_sigmoid(0.3 * (c - r)) for c, r in pairs) / 3
    assert loss_of("dpo", batch, flat, beta=0.3, loss_type="sigmoid_norm") == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(3))
def test_aot_compares_sorted_margins(seed: int) -> None:
    batch = preferences(LENGTHS, seed)
    flat = policy(batch, seed)
    batch = batch.drop(["log_probs"]).add({"log_probs": (flat, LENGTHS)})
    policy_margins = sorted(c - r for c, r in pairs_of(batch, sequence_sums(batch, flat)))
    reference = sequence_sums(batch, batch.tensor("ref_log_probs"))
    reference_margins = sorted(c - r for c, r in pairs_of(batch, reference))
    deltas = [0.3 * (mine - other) for mine, other in zip(policy_margins, reference_margins, strict=True)]
    expected = sum(-0.9 * log_sigmoid(delta) - 0.1 * log_sigmoid(-delta) for delta in deltas) / 3
    found = loss_of("dpo", batch, flat, beta=0.3, loss_type="aot", label_smoothing=0.1)
    assert found == pytest.approx(expected, rel=1e-6)


def test_orpo() -> None:
    # Without masks: a row without written tokens has probability 1 and no odds.
    batch = preferences(LENGTHS).drop(["response_mask"]).add({"response_mask": [[1] * n for n in LENGTHS]})
    flat = policy(batch)
    sums = sequence_sums(batch, flat)
    pairs = pairs_of(batch, [x / n for x, n in zip(sums, LENGTHS, strict=True)])
    odds = [math.log(math.exp(c) / (1 - math.exp(c))) - math.log(math.exp(r) / (1 - math.exp(r))) for c, r in pairs]
    chosen = [row for row in range(6) if batch["label"][row] == 1.0]
    likelihood = -sum(sums[row] for row in chosen) / sum(LENGTHS[row] for row in chosen)
    expected = likelihood - 0.1 * sum(math.log(sigmoid(x)) for x in odds) / 3
    assert loss_of("orpo", batch, flat) == pytest.approx(expected)


def test_a_pair_without_tokens_is_finite() -> None:
    batch = preferences([0, 2, 3, 0])
    for name in ("dpo", "ipo", "simpo", "orpo"):
        algorithm = make_algorithm(name)
        done, _ = algorithm.prepare(batch)
        leaf = policy(batch).requires_grad_()
        loss = algorithm.compute_loss(loss_input(algorithm, done, log_probs=leaf)).total
        assert loss.isfinite()
        assert torch.autograd.grad(loss, leaf)[0].isfinite().all()


@pytest.mark.parametrize("name", OFFLINE)
@pytest.mark.parametrize("muted", [False, True])
def test_masked_tokens_may_hold_anything(name: str, muted: bool) -> None:
    algorithm, batch = prepared(name, 1)
    mask = batch.tensor("response_mask") * (not muted)
    assert 0 in batch.lengths("response_tokens") and (mask == 0).any()
    lengths = batch.lengths("response_tokens")
    reference = batch.tensor("ref_log_probs").where(mask != 0, math.nan)
    batch = batch.drop(["response_mask", "ref_log_probs"])
    batch = batch.add({"response_mask": (mask, lengths), "ref_log_probs": (reference, lengths)})
    leaf = policy(batch).where(mask != 0, -math.inf) if algorithm.head == "lm" else torch.zeros(len(batch)).double()
    leaf.requires_grad_()
    outputs = {"log_probs" if algorithm.head == "lm" else "scores": leaf}
    loss = algorithm.compute_loss(loss_input(algorithm, batch, **outputs))
    assert loss.total.isfinite() and all(math.isfinite(float(value)) for value in loss.metrics.values())
    assert torch.autograd.grad(loss.total, leaf)[0].isfinite().all()


def test_rows_that_are_no_pair_are_left_out() -> None:
    batch = experience([1] * 9, ["a", "a", "b", "c", "c", "d", "d", "d", "e"], [None] * 9).add(
        {"label": [1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, None]}
    )
    batch = batch.drop(["response_tokens"]).add({"response_tokens": [[row] for row in range(9)]})
    done, metrics = make_algorithm("dpo").prepare(batch)
    assert done["group"] == ["a", "a"]
    assert metrics["pairs/dropped_rows"] == 7
    with pytest.raises(DataError, match="none of 7 rows belongs to a preference pair"):
        make_algorithm("dpo").prepare(batch.slice(2))
    with pytest.raises(DataError, match="no column 'label'"):
        make_algorithm("dpo").prepare(batch.drop(["label"]))
    with pytest.raises(ConfigError, match="label_smoothing"):
        make_algorithm("dpo", label_smoothing=0.1, loss_type="hinge")
    with pytest.raises(ConfigError, match="'exo_pair' needs label_smoothing above 0"):
        make_algorithm("dpo", loss_type="exo_pair")
    with pytest.raises(ConfigError, match="does not read the option 'discopop_tau'"):
        make_algorithm("dpo", discopop_tau=0.1)


def test_metrics_count_pairs() -> None:
    batch = preferences(LENGTHS)
    algorithm = make_algorithm("simpo")
    done, _ = algorithm.prepare(batch)
    metrics = algorithm.compute_loss(loss_input(algorithm, done, log_probs=policy(batch))).metrics
    tokens = [max(sum(mask), 1) for mask in batch["response_mask"]]
    means = [x / n for x, n in zip(sequence_sums(batch, policy(batch)), tokens, strict=True)]
    assert float(metrics["pairs/accuracy"]) == pytest.approx(sum(c > r for c, r in pairs_of(batch, means)) / 3)


@pytest.mark.parametrize("name", ["simpo", "reward_model"])
def test_the_accuracy_of_micro_batches_adds_up_to_1_at_most(name: str) -> None:
    batch = preferences(LENGTHS)
    algorithm = make_algorithm(name)
    done, _ = algorithm.prepare(batch)
    good = [10.0 * label - 20.0 for label in done["label"]]
    of_tokens = torch.tensor([v for v, n in zip(good, done.lengths("response_tokens"), strict=True) for _ in range(n)])
    given = {"log_probs": of_tokens} if name == "simpo" else {"scores": torch.tensor(good)}
    parts = [
        algorithm.compute_loss(loss_input(algorithm, done, rows, **given)).metrics for rows in done.group_indices()
    ]
    assert len(parts) == 3 and 1 - 1e-9 < combine_metrics(parts)["pairs/accuracy"] <= 1


def test_reward_model() -> None:
    batch = preferences(LENGTHS)
    algorithm = make_algorithm("reward_model", center_rewards_coefficient=0.1)
    assert algorithm.head == "score"
    scores = torch.tensor([0.1, -2.0, 0.7, 1.0, 0.0, 3.0], dtype=torch.float64)
    done, _ = algorithm.prepare(batch)
    got = algorithm.compute_loss(loss_input(algorithm, done, scores=scores))
    found = pairs_of(batch, scores.tolist())
    expected = sum(-math.log(sigmoid(c - r)) + 0.1 * (c + r) ** 2 for c, r in found) / 3
    assert float(got.total) == pytest.approx(expected)
    assert float(got.metrics["pairs/accuracy"]) == pytest.approx(sum(c > r for c, r in found) / 3)


def test_sft_leaves_out_what_is_labelled_bad() -> None:
    batch = preferences(LENGTHS)
    found, metrics = make_algorithm("sft").prepare(batch)
    assert found["id"] == [row for row, label in zip(batch["id"], batch["label"], strict=True) if label]
    assert metrics == {"sft/left_out": len(batch) - len(found)} and 0 < len(found) < len(batch)
    without = batch.drop(["label"])
    assert make_algorithm("sft").prepare(without) == (without, {})


def test_sft() -> None:
    batch = preferences(LENGTHS).drop(["label"])
    flat, mask = policy(batch), batch.tensor("response_mask") != 0
    assert loss_of("sft", batch, flat) == pytest.approx(-float(flat[mask].mean()))
    assert loss_of("sft", batch, flat, loss_agg_mode="token-sum") == pytest.approx(-float(flat[mask].sum()))


def test_dft_weighs_each_token_by_its_own_probability() -> None:
    batch = preferences(LENGTHS).drop(["label"])
    flat, mask = policy(batch), batch.tensor("response_mask") != 0
    expected = -sum(math.exp(float(x)) * float(x) for x in flat[mask]) / int(mask.sum())
    assert loss_of("sft", batch, flat, loss_type="dft") == pytest.approx(expected)
    leaf = flat.clone().requires_grad_()
    algorithm = make_algorithm("sft", loss_type="dft")
    algorithm.compute_loss(loss_input(algorithm, batch, log_probs=leaf)).total.backward()
    torch.testing.assert_close(leaf.grad, torch.where(mask, -flat.exp(), 0.0) / int(mask.sum()))


def extended(batch: Batch, shift: float) -> Batch:
    """KTO's rows as the models would fill them in; `shift` is the policy's distance on mismatched rows."""
    wide = make_algorithm("kto").extend(batch.drop(["log_probs", "ref_log_probs"]))
    lengths = wide.lengths("response_tokens")
    reference = -torch.ones(sum(lengths), dtype=torch.float64)
    distance = torch.where(torch.arange(sum(lengths)) < sum(lengths) // 2, 0.0, shift).double()
    return wide.add({"log_probs": (reference + distance, lengths), "ref_log_probs": (reference, lengths)})


def test_kto_pairs_each_prompt_with_the_response_before() -> None:
    batch = experience([1, 2, 3], ["a", "b", "c"], [None] * 3, label=[1.0, 0.0, 1.0])
    batch = batch.drop(["prompt_tokens"]).add({"prompt_tokens": [[10], [20], [30]]})
    wide = make_algorithm("kto").extend(batch)
    assert wide["mismatched"] == [False] * 3 + [True] * 3
    assert wide["prompt_tokens"] == [[10], [20], [30]] * 2
    assert wide.lengths("response_tokens") == [1, 2, 3, 3, 1, 2]
    assert len(set(wide["id"])) == 6
    with pytest.raises(DataError, match="two rows"):
        make_algorithm("kto").extend(batch.slice(0, 1))


def test_kto_pairs_no_prompt_with_a_response_to_itself() -> None:
    def donors(prompts: str) -> list[int]:
        rows = len(prompts)
        batch = experience(range(1, rows + 1), [*prompts], [None] * rows, label=[1.0] * rows)
        batch = batch.drop(["prompt_tokens"]).add({"prompt_tokens": [[ord(prompt)] for prompt in prompts]})
        return [length - 1 for length in make_algorithm("kto").extend(batch).lengths("response_tokens")[rows:]]

    assert donors("aabbcc") == [4, 5, 0, 1, 2, 3], "each response once, so as many chosen as rejected ones"
    assert donors("abba") == [1, 0, 3, 2]
    assert donors("abcb") == [3, 2, 1, 0]
    assert donors("aaba") == [2, 2, 0, 2], "there is one other"
    assert donors("aaa") == [2, 0, 1], "there is no other prompt"


@pytest.mark.parametrize("name", ["dpo", "simpo", "reward_model"])
def test_a_tie_is_half_a_win(name: str) -> None:
    algorithm, batch = make_algorithm(name), preferences([2, 2, 2, 2]).drop(["response_mask", "ref_log_probs"])
    batch, _ = algorithm.prepare(batch.add({"ref_log_probs": [[0.0, 0.0]] * 4}))
    better = torch.tensor([*batch["label"][:2], 0.0, 0.0])  # one pair is won, one is a tie
    outputs = {"scores": better} if name == "reward_model" else {"log_probs": better.repeat_interleave(2)}
    accuracy = algorithm.compute_loss(loss_input(algorithm, batch, **outputs)).metrics["pairs/accuracy"]
    assert float(accuracy) == 0.75


@pytest.mark.parametrize("shift", [0.4, -0.4])
def test_kto(shift: float) -> None:
    batch = experience(LENGTHS, [f"g{i}" for i in range(6)], [None] * 6, label=[1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    algorithm = make_algorithm("kto", beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    done, metrics = algorithm.prepare(extended(batch, shift))
    assert len(done) == 6
    written = batch.tensor("response_mask").sum()  # the mismatched rows hold the same responses
    kl = max(shift * float(written) / 6, 0.0)
    assert metrics["kl"] == pytest.approx(kl)
    flat = policy(batch)
    got = algorithm.compute_loss(loss_input(algorithm, done, log_probs=flat))
    expected = 0.0
    for ratio, label in zip(sequence_sums(batch, flat + 1), batch["label"], strict=True):
        weight, sign = (1.5, 1) if label else (0.5, -1)
        expected += weight * (1 - sigmoid(0.3 * sign * (ratio - kl)))
    assert float(got.total) == pytest.approx(expected / 6)


def test_kto_estimates_its_reference_point_of_so_many_rows() -> None:
    batch = experience(
        [1, 2, 3], ["a", "b", "c"], [None] * 3, label=[1.0, 0.0, 1.0], response_mask=[[1], [1] * 2, [1] * 3]
    )
    batch = batch.add({"kl_response_tokens": [[8] * 3, [8], [8] * 2]})
    wide = make_algorithm("kto").extend(batch.drop(["log_probs", "ref_log_probs"]))
    assert wide.lengths("response_tokens") == [1, 2, 3, 3, 1, 2] and "kl_response_tokens" not in wide
    lengths, ratios = wide.lengths("response_tokens"), [0.0, 0.0, 0.0, 0.5, 0.1, -1.0]
    policy = torch.tensor([ratio for ratio, length in zip(ratios, lengths, strict=True) for _ in range(length)])
    wide = wide.add({"log_probs": (policy.double(), lengths), "ref_log_probs": (torch.zeros(12).double(), lengths)})
    done, metrics = make_algorithm("kto", kl_rows=2).prepare(wide)
    assert done["kto_kl"] == pytest.approx([(3 * 0.5 + 0.1) / 2] * 2 + [0.0])
    assert metrics["kl"] == pytest.approx(1.6 / 3)


def test_apo_zero_of_single_responses() -> None:
    labels = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    batch = experience(LENGTHS, [f"g{i}" for i in range(6)], [None] * 6, label=labels)
    algorithm = make_algorithm("kto", beta=0.3, desirable_weight=1.5, loss_type="apo_zero_unpaired")
    done, metrics = algorithm.prepare(algorithm.extend(batch))
    flat = policy(batch)
    ratios = sequence_sums(batch, flat - batch.tensor("ref_log_probs", torch.float64))
    terms = [
        1.5 * (1 - sigmoid(0.3 * r)) if label else sigmoid(0.3 * r) for r, label in zip(ratios, labels, strict=True)
    ]
    assert float(algorithm.compute_loss(loss_input(algorithm, done, log_probs=flat)).total) == pytest.approx(
        sum(terms) / 6
    )
    assert metrics["kl"] == 0


def test_kto_without_its_rows_or_labels() -> None:
    batch = experience([1, 2], ["a", "b"], [None] * 2, label=[1.0, None])
    with pytest.raises(DataError, match="extend"):
        make_algorithm("kto").prepare(batch)
    done, metrics = make_algorithm("kto").prepare(extended(batch, 0.1))
    assert len(done) == 1
    assert metrics["kto/unlabelled"] == 1
    unlabelled = batch.drop(["label"]).add({"label": [None, None]})
    with pytest.raises(DataError, match="no row with a label"):
        make_algorithm("kto").prepare(extended(unlabelled, 0.1))


@pytest.mark.parametrize("name", ["dpo", "orpo", "simpo", "reward_model"])
def test_pairs_without_any_difference_are_refused(name: str) -> None:
    algorithm = make_algorithm(name)
    batch = preferences([3, 3, 2, 2])
    alike = [[1, 2, 3], [1, 2, 3], [4, 5], [4, 5]]
    equal = batch.drop(["response_tokens"]).add({"response_tokens": alike})
    with pytest.raises(DataError, match="each of 2 pairs are the same tokens"):
        algorithm.prepare(equal)
    other = batch.drop(["response_tokens"]).add({"response_tokens": [*alike[:3], [4, 6]]})
    assert len(algorithm.prepare(other)[0]) == 4, "of a batch where one pair differs the others stay"
