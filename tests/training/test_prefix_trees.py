"""Trajectories that fork: gradients and predictions are those of rows one by one, at less work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, MambaConfig

from tests.properties import examples
from tests.ranks import job
from tests.training.cases import (
    OPTIM,
    VOCAB,
    assert_same,
    distinct_beginnings,
    forked_batch,
    gradients,
    gradients_of,
    log_probs,
    make_engine,
    part,
    policy_loss,
    tiny_model,
    token_weights,
)
from verl.algorithms.base import Loss, LossInput
from verl.algorithms.baselines import GRPO
from verl.algorithms.loss_terms import LossNeeds, LossTerm
from verl.attention import prefix_tree as trees
from verl.batch import Batch
from verl.models.heads import ValueModel
from verl.models.packed import PackedModel
from verl.training.forward import Forward
from verl.training.micro_batch import Limits, partition, shared_tokens
from verl.workers.update import MiniBatchPlan, TaskLoss, run_updates

SCRIPT = Path(__file__).with_name("rank_prefix_trees.py")
KINDS = ("llama", "qwen2", "gpt2", "gemma", "qwen3_moe", "window")


@pytest.fixture(autouse=True)
def least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees of short rows."""
    monkeypatch.setattr(trees, "LEAST", 3)


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Flat tokens of each forward pass."""
    counts: list[int] = []
    pack = Forward.pack

    def counted(*args: Any) -> Any:
        flat = pack(*args)
        counts.append(len(flat.tokens))
        return flat

    monkeypatch.setattr(Forward, "pack", counted)
    return counts


def fed(batch: Batch) -> int:
    return sum(batch.lengths("prompt_tokens")) + sum(n - 1 for n in batch.lengths("response_tokens"))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_forks_in_three_levels_are_those_of_flat_rows_at_less_work(kind: str, tokens: list[int]) -> None:
    batch = forked_batch()
    found, expected = (
        gradients(make_engine(tiny_model(kind), optim=OPTIM, share_prompts=share), batch, entropy=True)
        for share in (True, False)
    )
    assert_same(found, expected, 1e-6 if kind == "gemma" else 1e-10)  # its norms are fp32
    assert tokens == [distinct_beginnings(batch), fed(batch)]
    assert tokens[0] < 0.6 * tokens[1] and shared_tokens(batch) == tokens[1] - tokens[0]
    (rows,) = partition(batch, range(len(batch)), 1, Limits())[0]
    assert len(rows) == 1


@pytest.mark.parametrize("limits", [{"max_tokens_per_micro_batch": 40}, {"micro_batch_size": 3}])
@pytest.mark.parametrize("kind", ["llama", "window"])
def test_trees_are_cut_at_forks(kind: str, limits: dict[str, Any], tokens: list[int]) -> None:
    batch = forked_batch()
    options = {"optim": OPTIM, **limits}
    found = gradients(make_engine(tiny_model(kind), **options), batch)
    cut = [*tokens]
    assert len(cut) > 1 and distinct_beginnings(batch) < sum(cut) < fed(batch)
    assert max(cut) <= limits.get("max_tokens_per_micro_batch", 1000)
    assert_same(found, gradients(make_engine(tiny_model(kind), optim=OPTIM, share_prompts=False), batch), 1e-10)


@pytest.mark.parametrize("kind", ["llama", "window"])
def test_predictions_and_values_are_those_of_flat_rows(kind: str, tokens: list[int]) -> None:
    batch = forked_batch()
    for head, want in (("lm", ("log_probs", "entropy")), ("value", ("values",)), ("score", ("scores",))):
        models = [tiny_model(kind) if head == "lm" else ValueModel.from_model(tiny_model(kind)) for _ in range(2)]
        for limit in (None, 40):
            one, other = (
                make_engine(model, head, share_prompts=share, max_tokens_per_micro_batch=limit).predict(batch, want)
                for model, share in zip(models, (True, False), strict=True)
            )
            for name in want:
                torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-10)
    assert tokens[0] == distinct_beginnings(batch)


def value_loss(x: LossInput) -> Loss:
    assert x.values is not None
    return Loss(total=(x.weights * x.values * x.columns["advantages"] + 0.1 * x.weights * x.values.square()).sum())


def test_gradients_of_a_critic() -> None:
    batch = forked_batch()
    needs = LossNeeds(columns=["advantages"])
    found, expected = (
        gradients_of(
            make_engine(ValueModel.from_model(tiny_model("qwen2")), "value", optim=OPTIM, share_prompts=share),
            [LossTerm(batch, value_loss, token_weights(batch), needs)],
        )
        for share in (True, False)
    )
    assert_same(found, expected, 1e-10)


def by_weight(x: LossInput) -> Loss:
    assert x.log_probs is not None and x.entropy is not None
    per_token = torch.where(x.weights != 0, x.log_probs * x.columns["advantages"] - x.entropy, 0.0)
    return Loss(total=(x.weights * per_token).sum())


@pytest.mark.parametrize("options", [{}, {"share_prompts": False}, {"max_tokens_per_micro_batch": 40}])
def test_the_head_computes_what_the_policy_wrote_alone(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token that was sampled once, whatever repeats it; predictions are of all tokens."""
    rows: list[int] = []
    real = PackedModel.log_probs

    def counted(self: PackedModel, hidden: Any, *arguments: Any, **more: Any) -> Any:
        rows.append(len(hidden))
        return real(self, hidden, *arguments, **more)

    monkeypatch.setattr(PackedModel, "log_probs", counted)
    batch, needs = forked_batch(), LossNeeds(columns=["advantages"], entropy=True)
    unmasked = batch.drop(["response_mask"])
    results, counts = [], []
    for each in (batch, unmasked):
        rows.clear()
        engine = make_engine(tiny_model("qwen2"), optim=OPTIM, **options)
        results.append(gradients_of(engine, [LossTerm(each, by_weight, token_weights(batch), needs)]))
        counts.append(sum(rows))
    assert_same(results[0], results[1], 1e-12)
    assert counts == [sum(map(sum, batch["response_mask"])), sum(batch.lengths("response_tokens"))]
    assert bool((log_probs(engine, batch) != 0).all())


def by_ratio(x: LossInput) -> Loss:
    assert x.log_probs is not None
    return Loss(total=(x.weights * (x.log_probs - x.columns["old_log_probs"]).exp()).sum())


def test_a_loss_of_ratios_is_finite_where_the_policy_wrote_nothing() -> None:
    """Whatever the log-probs of what it read."""
    batch, lengths = forked_batch(), forked_batch().lengths("response_tokens")
    mask = batch.tensor("response_mask").bool()
    old = torch.where(mask, -3.0, -1000.0).double()
    needs = LossNeeds(columns=["old_log_probs"])
    part = LossTerm(batch.add({"old_log_probs": (old, lengths)}), by_ratio, token_weights(batch), needs)
    gradients = gradients_of(make_engine(tiny_model(), optim=OPTIM), [part])
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values()) and gradients


def test_rows_of_which_the_policy_wrote_nothing() -> None:
    read = Batch.from_columns({"prompt_tokens": [[1]], "response_tokens": [[2, 3]], "response_mask": [[0, 0]]})
    part = LossTerm(
        read.add({"advantages": [[1.0, 1.0]]}),
        by_weight,
        torch.ones(2),
        LossNeeds(columns=["advantages"], entropy=True),
    )
    gradients = gradients_of(make_engine(tiny_model(), optim=OPTIM), [part])
    assert all(float(gradient.abs().max()) == 0 for gradient in gradients.values())


@examples(20)
@given(st.sets(st.integers(0, 10), min_size=1), st.sampled_from([None, 25, 60]), st.integers(0, 3))
def test_some_rows_of_a_tree(computed: set[int], limit: int | None, seed: int) -> None:
    batch = forked_batch(seed)
    left_out = sorted({*range(len(batch))} - computed)
    found, expected = (
        gradients_of(
            make_engine(tiny_model(), optim=OPTIM, share_prompts=share, max_tokens_per_micro_batch=limit),
            [LossTerm(batch, policy_loss, token_weights(batch), part(batch).needs, left_out)],
        )
        for share in (True, False)
    )
    assert_same(found, expected, 1e-10)


def test_models_with_state_stay_flat(tokens: list[int]) -> None:
    """Each row whole, as micro-batches count it but for equal prompts."""
    config = MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4)
    torch.manual_seed(0)
    engine = make_engine(AutoModelForCausalLM.from_config(config, dtype=torch.float64), optim=OPTIM)
    assert not engine.shares_prefixes
    batch = forked_batch()
    dealt, _ = partition(batch, range(len(batch)), 1, engine.limits._replace(max_tokens=60))
    for rows in dealt[0]:
        prompts = {tuple(batch["prompt_tokens"][row]) for row in rows}
        assert sum(map(len, prompts)) + sum(len(batch["response_tokens"][row]) - 1 for row in rows) <= 60
    one_by_one = [log_probs(engine, batch.take([row])) for row in range(len(batch))]
    torch.testing.assert_close(log_probs(engine, batch), torch.cat(one_by_one), rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"share_prompts": False}, {"remove_padding": False}])
def test_an_update_counts_what_rows_share(options: dict[str, Any]) -> None:
    """The same number for any micro-batches."""
    batch = forked_batch()
    engine = make_engine(tiny_model(), optim=OPTIM, micro_batch_size=3, **options)
    metrics = run_updates(engine, [TaskLoss(batch, GRPO().objective("actor"))], MiniBatchPlan(epochs=2), 0)
    counts = metrics["update/tokens_shared"], metrics["update/tokens_flat"]
    saved = fed(batch) - distinct_beginnings(batch)
    assert counts == ((0, saved) if options else (saved, 0))


@st.composite
def trajectories(draw: st.DrawFn) -> Batch:
    """Rows of a few groups, each of which may go on from a piece of an earlier one."""
    rows: list[tuple[str, list[int]]] = []
    for _ in range(draw(st.integers(1, 14))):
        group = draw(st.sampled_from("ab"))
        earlier = draw(st.sampled_from([[], *(row for name, row in rows if name == group)]))
        new = draw(st.lists(st.integers(0, 30), min_size=2, max_size=12))
        rows.append((group, earlier[: draw(st.integers(0, len(earlier)))] + new))
    prompts = [draw(st.integers(1, len(row) - 1)) for _, row in rows]
    return Batch.from_columns(
        {
            "group": [group for group, _ in rows],
            "prompt_tokens": [row[:n] for (_, row), n in zip(rows, prompts, strict=True)],
            "response_tokens": [row[n:] for (_, row), n in zip(rows, prompts, strict=True)],
        }
    )


@examples(100)
@given(trajectories(), st.none() | st.integers(1, 80), st.none() | st.integers(1, 5), st.integers(1, 4))
def test_every_row_once_within_the_limits_and_trees_whole(
    batch: Batch, max_tokens: int | None, max_rows: int | None, ranks: int
) -> None:
    dealt, tree = partition(batch, range(len(batch)), ranks, Limits(max_tokens, max_rows))
    parts = [rows for rank in dealt for rows in rank]
    assert sorted(row for rows in parts for row in rows) == list(range(len(batch)))
    for rows in parts:
        assert len(rows) == 1 or max_rows is None or len(rows) <= max_rows
        assert len(rows) == 1 or max_tokens is None or tree.tokens(rows) <= max_tokens
        assert rows == [row for part in tree.trees(rows) for row in part]  # relatives side by side
    whole = tree.trees(range(len(batch)))
    share = -(-sum(tree.lengths) // ranks)
    rank_of = {row: rank for rank, of_rank in enumerate(dealt) for rows in of_rank for row in rows}
    for members in whole:
        if max(map(tree.tokens, whole)) <= share:  # else it is more than a rank's share
            assert len({rank_of[row] for row in members}) == 1
        if tree.tokens(members) <= (max_tokens or 10**6) and len(members) <= (max_rows or 10**6):
            homes = {number for number, rows in enumerate(parts) if {*rows} & {*members}}
            assert len(homes) == len({rank_of[row] for row in members})


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["fast", "all"])
def test_every_layout_of_four_ranks_gives_the_gradients_of_flat_rows(cases: str) -> None:
    done = job(4, SCRIPT, cases)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines
    for line in lines:
        assert line["gradient"] < 1e-10, line
        assert line["predicted"] < 1e-10, line
        assert line["tokens"] < line["flat"], line
