"""Updates without the rows whose gradient is 0 move the weights as updates with them do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import job
from tests.training.cases import OPTIM, make_engine, state_of, tiny_model
from tests.training.zero_advantage_steps import (
    GROUP,
    KL,
    STEPS,
    VARIANTS,
    farthest,
    prepared_steps,
    stepped,
    weights_of,
)
from verl.algorithms.base import Loss, LossInput
from verl.algorithms.baselines import GRPO
from verl.algorithms.loss_terms import LossNeeds, LossTerm
from verl.errors import DataError, TrainingError
from verl.models.heads import ValueModel, score_model
from verl.training.forward import Forward
from verl.training.torch_engine import TorchEngine
from verl.workers.update import MiniBatchPlan, TaskLoss, loss_term, run_updates

SCRIPT = Path(__file__).with_name("rank_zero_advantage.py")
FAST = [("grpo", {}), ("gmpo", KL), ("safe_rlhf", {"baseline": "critics"}), ("sft", {}), ("orpo", {})]
ALIKE = (STEPS[1],)
#: A step is not the sign of a gradient: a rounding stays one.
SMOOTH = OPTIM.replace(adam_eps=1e-4)


def engine_of(head: str = "lm", **options: Any) -> TorchEngine:
    model: Any = tiny_model("gpt2")  # with weights that only some tokens reach
    model = {"lm": lambda m: m, "value": ValueModel.from_model, "score": score_model}[head](model)
    return make_engine(model, head, **{"optim": SMOOTH, "micro_batch_size": GROUP, **options})  # type: ignore[arg-type]


def without_rejected(name: str, steps: Any = STEPS, **options: Any) -> Any:
    """An algorithm and its steps, in which every token counts."""
    return prepared_steps(name, steps, rejected=False, **options)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Rows of each forward pass."""
    rows: list[int] = []
    pack = Forward.pack
    monkeypatch.setattr(
        Forward, "pack", lambda self, batch, tree=None: (rows.append(len(batch)), pack(self, batch, tree))[1]
    )
    yield rows
    monkeypatch.setattr(Forward, "pack", pack)


@pytest.mark.quick("grpo-options0", "sft-options3")
@pytest.mark.parametrize(("name", "options"), FAST)
def test_weights_are_the_same_with_and_without_the_rows(name: str, options: dict[str, Any]) -> None:
    check_weights(name, options)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({name for name, _ in VARIANTS}))
def test_weights_are_the_same_for_every_algorithm_with_and_without_kl_and_entropy(name: str) -> None:
    for options in (options for known, options in VARIANTS if known == name):
        check_weights(name, options)


def check_weights(name: str, options: dict[str, Any]) -> None:
    """Of every role, in one mini-batch a step, and in several, twice."""
    algorithm, batches = prepared_steps(name, **options)
    for role in sorted(algorithm.roles & {"actor", "critic", "cost_critic"}):
        head = algorithm.head if role == "actor" else "value"
        for plan in ({}, {"mini_batch_size": 2 * GROUP, "epochs": 2}):
            one, other = (
                stepped(engine_of(head), [(algorithm, batches)], role=role, skip=is_on, **plan)
                for is_on in (True, False)
            )
            assert farthest(one.weights, other.weights) <= 1e-12
            for a, b in zip(one.metrics, other.metrics, strict=True):
                assert b["update/rows_left_out"] == b["update/tokens_left_out"] == 0
                for metric in ("loss", "grad_norm", "lr", "update/steps"):
                    assert a[metric] == pytest.approx(b[metric], abs=1e-12)


@pytest.mark.parametrize("name", ["grpo", "gspo", "rloo"])
def test_bit_for_bit_where_each_micro_batch_is_a_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, batches = without_rejected(name)
    found = []
    for skip in (True, False):
        with counted(monkeypatch) as forwards:
            found.append(stepped(engine_of(), [(algorithm, batches)], skip=skip))
        groups = [group for alike in STEPS for group in alike]
        assert forwards == [GROUP] * (groups.count(False) if skip else len(groups))
    rows = [[metrics["update/rows_left_out"] for metrics in one.metrics] for one in found]
    assert rows == [[GROUP * sum(alike) for alike in STEPS], [0.0] * len(STEPS)]
    assert all(torch.equal(found[0].weights[name], weight) for name, weight in found[1].weights.items())


def test_a_step_of_which_all_rows_are_left_out_is_a_step_with_a_gradient_of_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments, weight decay and the schedule go on, without a forward pass; so does a loss scale of fp16."""
    optim = SMOOTH.replace(schedule="linear", total_steps=10)
    algorithm, batches = without_rejected("grpo")
    engines = [engine_of(optim=optim) for _ in range(2)]
    for engine in engines:
        engine.optimizer.gradients._is_scaled = True  # type: ignore[union-attr]
        stepped(engine, [(algorithm, batches[:1])], skip=True)
    before = weights_of(engines[0])
    with counted(monkeypatch) as forwards:
        metrics = stepped(engines[0], [(algorithm, batches[1:2])], skip=True).metrics[0]
    assert forwards == []
    assert (metrics["loss"], metrics["grad_norm"], metrics["update/skipped"]) == (0.0, 0.0, 0.0)
    assert metrics["update/steps"] == 1 and metrics["lr"] == pytest.approx(9e-3)
    assert metrics["update/rows_left_out"] == len(batches[1])
    assert metrics["update/tokens_left_out"] == sum(batches[1].lengths("response_tokens"))
    other = stepped(engines[1], [(algorithm, batches[1:2])], skip=False).metrics[0]
    assert other["grad_norm"] == 0.0
    assert engines[0].state()[1] == engines[1].state()[1]
    states = [state_of(engine) for engine in engines]
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())
    assert all(torch.equal(*pair) for pair in zip(*(weights_of(e).values() for e in engines), strict=True))
    assert all(not torch.equal(weight, before[name]) for name, weight in weights_of(engines[0]).items())


def test_metrics_of_a_forward_pass_are_of_the_rows_that_are_computed() -> None:
    algorithm, batches = without_rejected("grpo")
    half, none = (stepped(engine_of(), [(algorithm, batches[i : i + 1])], skip=True).metrics[0] for i in (0, 1))
    # The groups that are computed, alone: the same means.
    rows = [row for row, group in enumerate(batches[0]["group"]) if not STEPS[0][int(group[1:])]]
    alone = stepped(engine_of(), [(algorithm, [batches[0].take(rows)])], skip=True).metrics[0]
    for name in ("policy/kl", "policy/clip_fraction", "policy/clip_fraction_lower"):
        assert half[name] == pytest.approx(alone[name], abs=1e-12)
    assert half["policy/kl"] != 0
    assert half["loss"] != pytest.approx(alone["loss"])  # the denominator is of all rows
    assert not [name for name in none if name.startswith(("policy/", "mismatch/", "loss/"))]


def test_totals_are_of_all_rows_beside_the_counts_of_those_that_are_computed() -> None:
    algorithm, (batch, *_) = without_rejected("grpo")
    weights, seen = algorithm.token_weights(batch), []

    def loss(x: LossInput) -> Loss:
        seen.append(x)
        return algorithm.compute_loss(x)

    left_out = [0, 1, 4]
    needs = LossNeeds(columns=algorithm.loss_columns)
    engine_of().update([LossTerm(batch, loss, weights, needs, left_out)])
    counts = [int(part.count_nonzero()) for part in weights.split(batch.lengths("response_tokens"))]
    assert sum(x.num_sequences for x in seen) == len(batch) - 3
    for x in seen:
        assert (x.total_sequences, x.total_active, x.total_groups) == (len(batch), sum(counts), 4)
        assert x.computed_sequences == len(batch) - 3
        assert x.computed_tokens == sum(counts) - sum(counts[row] for row in left_out)


def test_a_loss_without_an_update_is_of_the_same_rows() -> None:
    algorithm, batches = without_rejected("grpo")
    part = TaskLoss(batches[1], algorithm.objective("actor"))
    engine = engine_of()
    assert engine.loss([loss_term(engine, part, False)])["policy/kl"] != 0
    assert engine.loss([loss_term(engine, part, True)]) == {"loss": 0.0}


class Detached(GRPO):
    no_gradient_at_zero = True

    def compute_loss(self, x: LossInput) -> Loss:
        assert x.log_probs is not None
        return Loss(total=(x.weights * x.columns["advantages"] * x.log_probs.detach()).sum())


def test_a_detached_loss_is_an_error_also_where_rows_are_left_out() -> None:
    _, batches = without_rejected("grpo")
    with pytest.raises(TrainingError, match="does not depend on what the model predicts"):
        run_updates(engine_of(), [TaskLoss(batches[0], Detached().objective("actor"))], MiniBatchPlan(), 0)


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("zero", marks=pytest.mark.slow)])
def test_a_detached_loss_is_an_error_on_a_rank_without_rows_too(kind: str) -> None:
    """One group is computed, by one of two ranks: the other, which waits for it in its backward pass, ends as well."""
    if kind == "zero":
        pytest.importorskip("deepspeed")
    done = job(2, SCRIPT.with_name("rank_detached.py"), kind)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == {"fsdp": 1, "zero": 3}[kind]
    for line in lines:
        assert ["does not depend on what the model predicts" in error for error in line["refused"]] == [True] * 2, line


def test_weights_that_do_not_fit_are_refused_as_before() -> None:
    _, batches = without_rejected("grpo")
    algorithm = GRPO()
    algorithm.token_weights = lambda batch: torch.ones(3)  # type: ignore[method-assign]
    with pytest.raises(DataError, match="need as many weights"):
        run_updates(engine_of(), [TaskLoss(batches[0], algorithm.objective("actor"))], MiniBatchPlan(), 0)


def test_of_several_tasks_one_may_have_nothing_to_compute() -> None:
    tasks = [
        without_rejected("grpo"),
        prepared_steps("reinforce_plus_plus"),
        without_rejected("rloo", (*STEPS[1:], STEPS[0])),
    ]
    one, other = (stepped(engine_of(), tasks, skip=is_on) for is_on in (True, False))
    assert farthest(one.weights, other.weights) <= 1e-12
    assert "task/0/policy/kl" in one.metrics[0] and "task/0/policy/kl" not in one.metrics[1]
    assert [metrics["task/1/policy/kl"] for metrics in one.metrics] == pytest.approx(
        [metrics["task/1/policy/kl"] for metrics in other.metrics], abs=1e-12
    )
    assert all(metrics["grad_norm"] > 0 for metrics in one.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["fast", "layouts", "several", "megatron", "zero"])
def test_ranks_learn_the_same_with_and_without_the_rows(cases: str) -> None:
    """0, 1, 2 and 3 groups are left on four ranks, in each layout; and all, on some."""
    if cases in ("megatron", "zero"):
        pytest.importorskip({"megatron": "megatron.core", "zero": "deepspeed"}[cases])
    done = job(2 if cases == "zero" else 4, SCRIPT, cases)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines
    for line in lines:
        assert line["apart"] <= line["within"], line
        assert line["left_out"] == line["expected"], line
        assert line["forwards"] == 1, line  # ranks with collectives run as many, whatever rows they have
