"""Training without the rows whose gradient is 0: the same weights as with them, less work, and what the record says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import verl
from tests.conftest import save_tiny
from tests.trainer.cases import PROMPTS, SHORT, collected
from verl.algorithms import PolicyGradient, make_algorithm
from verl.algorithms.baselines import GRPO
from verl.algorithms.policy import Experience
from verl.batch import Batch
from verl.errors import TrainingError
from verl.roles.updater import Updater
from verl.trainer import SafetyGuard

#: Steps of two prompts: the samples of the second score alike, those of both, of none.
ALIKE = [PROMPTS, ["In the other beginning", "In the beginning"], ["Once upon a time", "Once more"]]
SEVERAL_STEPS = {"mini_batch_size": 4, "epochs": 2}


def by_prompt(texts: list[str], prompts: list[str]) -> list[float]:
    """The samples of prompts that begin with "In" score alike."""
    return [
        0.1 if prompt.startswith("In") else sum(map(ord, text)) % 7 for text, prompt in zip(texts, prompts, strict=True)
    ]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("exact") / "model", "gpt2", torch.float64)


def trainer_of(path: Path, skip_zero_advantage_rows: bool, training: dict[str, Any], **options: Any) -> verl.Trainer:
    # A step that is not the sign of a gradient: a rounding stays one.
    actor = verl.Actor(str(path), optim={"lr": 1e-2, "adam_eps": 1e-4}, sampling=SHORT, **training)
    if "tasks" not in options:
        options = {"reward_fn": by_prompt, "algorithm": "grpo", "n": 4, **options}
    return verl.Trainer(actor, skip_zero_advantage_rows=skip_zero_advantage_rows, log_dir=False, **options)


def two_tasks() -> list[verl.Task]:
    return [verl.Task("a", "grpo", {"reward": by_prompt}, n=4), verl.Task("b", "ppo", {"reward": by_prompt}, n=2)]


CASES: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "one step": ({}, dict),
    "several steps": (SEVERAL_STEPS, dict),
    "another engine": ({"rollout": "hf"}, dict),
    "another engine, several steps": ({"rollout": "hf", **SEVERAL_STEPS}, dict),
    "ppo": (SEVERAL_STEPS, lambda: {"algorithm": "ppo"}),
    "safe_rlhf": ({}, lambda: {"algorithm": "safe_rlhf", "cost": by_prompt, "baseline": "critics"}),
    "tasks": ({}, lambda: {"tasks": two_tasks()}),
}  # fmt: skip


@pytest.mark.quick("one step", "tasks", "another engine")
@pytest.mark.parametrize("case", CASES)
def test_training_learns_the_same(exact: Path, case: str) -> None:
    training, options = CASES[case]
    weights, records = [], []
    for skip_zero_advantage_rows in (True, False):
        trainer = trainer_of(exact, skip_zero_advantage_rows, training, **options())
        steps = ALIKE if len(trainer.tasks) == 1 else [{"a": prompts, "b": prompts[:1]} for prompts in ALIKE]
        records.append([trainer.step(prompts) for prompts in steps])
        weights.append(
            {f"{role}/{s.name}": s.tensor.clone() for role, handle in trainer.roles.items() for s in handle.shards()}
        )
    assert all(float((weights[0][name] - other).abs().max()) <= 1e-12 for name, other in weights[1].items())
    for a, b in zip(*records, strict=True):
        assert b["update/rows_left_out/actor"] == b["update/tokens_left_out/actor"] == 0
        assert a["train/tokens"] == b["train/tokens"] - a["update/tokens_left_out/actor"]
        for name, value in b.items():
            if name.startswith(("reward", "advantages", "loss/actor", "grad_norm", "kl", "response", "lr", "updated")):
                assert a[name] == pytest.approx(value, abs=1e-10), name
    left_out = [record["update/rows_left_out/actor"] for record in records[0]]
    if case == "tasks":  # of PPO, too, where rewards, values and KL are alike
        assert left_out[0] >= 4 and left_out[1] >= 8
    else:
        assert left_out == ([0.0] * 3 if case in ("ppo", "safe_rlhf") else [4.0, 8.0, 0.0])


def prepared(trainer: verl.Trainer, rows: Batch) -> tuple[Batch, dict[str, float]]:
    return trainer.updater.prepare(trainer.updater.compute_log_probs_and_values(rows))


def test_log_probs_before_the_update_are_of_the_rows_that_it_computes(exact: Path) -> None:
    on, off = (trainer_of(exact, is_on, SEVERAL_STEPS, rollout_is="sequence") for is_on in (True, False))
    rows = collected(off, PROMPTS).rows
    # Samples of another policy, so that there is a mismatch.
    far = [[value - 0.1 * (i % 3) for i, value in enumerate(row)] for row in rows["rollout_log_probs"]]
    rows = rows.drop(["policy_id", "rollout_log_probs"]).add({"rollout_log_probs": far})
    (some, metrics), (every, _) = prepared(on, rows), prepared(off, rows)
    assert [row is None for row in some["log_probs"]] == [False] * 4 + [True] * 4
    for column in ("log_probs", "old_log_probs", "rollout_is_weights"):
        assert torch.allclose(*(batch.take(range(4)).tensor(column) for batch in (some, every)))
        assert some[column][4:] == [None] * 4
    assert some["advantages"] == every["advantages"]
    _, of_four = prepared(off, rows.take(range(4)))
    mismatch = [name for name in metrics if name.startswith("mismatch/")]
    assert len(mismatch) == 5 and metrics["mismatch/kl"] != 0
    assert {name: metrics[name] for name in mismatch} == pytest.approx({name: of_four[name] for name in mismatch})
    assert on.learn(rows)["update/rows_left_out/actor"] == 4


def test_where_all_rows_are_left_out_there_are_no_log_probs_and_no_mismatch(exact: Path) -> None:
    trainer = trainer_of(exact, True, SEVERAL_STEPS)
    rows = collected(trainer, ALIKE[1]).rows
    batch, metrics = prepared(trainer, rows)
    assert "log_probs" not in batch and not [name for name in metrics if name.startswith("mismatch/")]
    record = trainer.step(ALIKE[1])
    assert record["update/steps/actor"] == 4 and record["grad_norm/actor"] == record["loss/actor"] == 0
    assert record["updated"] and trainer.updates == 0 and trainer.idle == 1
    assert not [name for name in record if name.startswith(("policy/", "mismatch/"))]
    assert record["train/tokens"] == 0 and record["update/rows_left_out/actor"] == 8


def test_where_no_row_is_left_that_has_log_probs_there_is_no_mismatch() -> None:
    """The one that has them is alone of its prompt, and dropped."""
    length = [[-1.0, -2.0]]
    batch = Batch.from_columns({
        "group": ["a", "a", "b", "b"],
        "response_tokens": [[5, 6]] * 4,
        "reward": [0.5, None, 0.3, 0.3],
        "rollout_log_probs": length * 4,
        "log_probs": length + [None] * 3,
    })  # fmt: skip
    assert make_algorithm("grpo").needs(batch, "actor") == [True, False, False, False]
    prepared, metrics = make_algorithm("grpo").prepare(batch)
    assert prepared["log_probs"] == [None, None] and "rollout_is_weights" not in prepared
    assert not [name for name in metrics if name.startswith("mismatch/")]


class Entropic(GRPO):
    """Advantages that are not of rewards alone."""

    def estimate(self, e: Experience) -> dict[str, torch.Tensor]:
        return {"advantages": -e.responses.tokens("log_probs")}


class Restated(Entropic):
    zero_where_alike = True


class Lengths(GRPO):
    def own_outcome(self, batch: Batch) -> torch.Tensor:
        return torch.tensor(batch.lengths("response_tokens"), dtype=torch.float64)


@pytest.mark.parametrize(
    ("algorithm", "options", "rows"),
    [
        ("grpo", {}, [1, 1, 0, 0, 0, 1]),
        ("rloo", {}, [1, 1, 0, 0, 0, 1]),
        ("gspo", {}, [1, 1, 0, 0, 0, 1]),
        ("dapo", {"overlong_length": 4, "overlong_buffer": 2}, [1, 1, 1, 1, 0, 1]),
        (Restated, {}, [1, 1, 0, 0, 0, 1]),
        ("grpo", {"kl_in": "reward"}, None),
        ("grpo", {"kl_in": "loss"}, None),
        ("grpo", {"rollout_rs": "token_k1"}, None),
        ("grpo", {"rollout_is_normalize": True}, None),
        ("ppo", {}, None),
        ("reinforce_plus_plus", {}, None),
        ("reinforce_plus_plus_baseline", {}, None),
        ("safe_rlhf", {}, None),
        ("remax", {}, None),
        ("distillation", {}, None),
        ("dpo", {}, None),
        (Entropic, {}, None),
        (Lengths, {}, None),
    ],
)
def test_log_probs_are_needed_where_more_than_rewards_decides(
    algorithm: Any, options: dict[str, Any], rows: Sequence[int] | None
) -> None:
    """Rows: two that differ; two alike, of other lengths; one that abstained, and the only one of its prompt."""
    batch = Batch.from_columns({
        "group": ["a", "a", "b", "b", "c", "d"],
        "prompt_tokens": [[1]] * 6,
        "response_tokens": [[5] * length for length in (1, 1, 2, 4, 2, 2)],
        "reward": [0.0, 1.0, 0.3, 0.3, None, 0.5],
    })  # fmt: skip
    needed = make_algorithm(algorithm, **options).needs(batch, "actor")
    assert needed == (None if rows is None else [bool(row) for row in rows])
    assert make_algorithm(algorithm, **options).needs(batch, "reference") is None


@pytest.mark.parametrize("options", [{"entropy_coeff": 0.1}, {"kl_in": "loss"}])
def test_log_probs_are_of_all_rows_where_the_update_computes_them(exact: Path, options: dict[str, Any]) -> None:
    trainer = trainer_of(exact, True, SEVERAL_STEPS, **options)
    record = trainer.step(PROMPTS)
    assert record["update/rows_left_out/actor"] == 0 and "policy/kl" in record


def test_an_algorithm_that_reads_log_probs_by_itself_has_all(exact: Path) -> None:
    class Reading(GRPO):
        needs_log_probs = True

    actor = verl.Actor(str(exact), sampling=SHORT)
    updater = Updater(Reading(), actor=actor)
    rows = collected(trainer_of(exact, True, {}), PROMPTS).rows
    assert None not in updater.prepare(rows)[0]["log_probs"]


def test_a_run_of_steps_that_left_out_all_rows_ends_by_name(exact: Path) -> None:
    trainer = trainer_of(exact, True, {})
    with pytest.raises(
        TrainingError, match="none of 2 updates changed the policy: no token had a gradient other than 0"
    ):
        trainer.fit([ALIKE[1]] * 2, steps=2)


def test_a_guard_takes_a_metric_that_is_absent_as_no_reading(exact: Path, tmp_path: Path) -> None:
    guard = SafetyGuard(["policy/clip_fraction"], 0.5, window=1, baseline=2)
    trainer = trainer_of(exact, True, SEVERAL_STEPS, checkpoint_dir=tmp_path, save_every=10)
    trainer.add_guard(guard)
    for prompts in (*ALIKE, ALIKE[1]):
        trainer.step(prompts)
    assert guard.state_dict()["metrics"]["policy/clip_fraction"]["steps"] == [1, 3]


def test_the_option_is_of_every_model(exact: Path) -> None:
    for skip_zero_advantage_rows in (True, False):
        trainer = trainer_of(exact, skip_zero_advantage_rows, {}, algorithm="ppo")
        assert [handle.plan.skip_zero_advantage_rows for handle in trainer.roles.values()] == [
            skip_zero_advantage_rows
        ] * 2


def test_every_policy_gradient_that_states_it_has_advantages_of_0_where_samples_score_alike() -> None:
    kinds = {name: make_algorithm(name) for name in verl.algorithms.algorithm_names()}
    stated = {name for name, kind in kinds.items() if isinstance(kind, PolicyGradient) and type(kind).zero_where_alike}
    assert stated >= {"grpo", "rloo", "opo", "gpg", "grpo_passk", "dapo", "dr_grpo", "gspo", "cispo", "gmpo"}
    batch = Batch.from_columns({
        "group": [f"g{row // 3}" for row in range(9)],
        "response_tokens": [[5] * (1 + row % 4) for row in range(9)],
        "reward": [0.1] * 3 + [1 / 3] * 3 + [0.0, 1.0, 2.0],
    })  # fmt: skip
    for name in sorted(stated):
        advantages = kinds[name].prepare(batch)[0]["advantages"]
        assert all(value == 0 for row in advantages[:6] for value in row), name
