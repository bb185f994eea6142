"""TRL's entries of an update: measured in the forward pass of the loss, however it is divided, and moving nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import verl.trl
from tests.algorithms.support import loss_input, prepared
from tests.algorithms.test_with_engine import update
from verl.algorithms.base import FurtherMetrics
from verl.training.forward import Forward
from verl.trl import entries

ASK = [f"Say {i}: " for i in range(4)]
TURNS = [{"prompt": ask, "completion": "aaaa"} for ask in ASK]
PAIRS = [{"prompt": ask, "chosen": "aaaa", "rejected": "zzzz zz"} for ask in ASK]
LABELS = [{**row, "label": i % 2 == 0} for i, row in enumerate(TURNS)]
_SIDES = {f"{what}/{side}" for what in ("rewards", "logps", "logits") for side in ("chosen", "rejected")}
_CLIP = {f"clip_ratio/{side}" for side in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")}
_PAIRS = {"entropy", "mean_token_accuracy", "rewards/margins", "rewards/accuracies", *_SIDES}
_SCORES = {"min_reward", "mean_reward", "max_reward", "accuracy", "margin"}
#: Trainer -> data, and what TRL logs of it.
LOGGED: dict[str, tuple[list[Any], set[str]]] = {
    "SFT": (TURNS, {"entropy", "mean_token_accuracy", "num_tokens"}),
    "DPO": (PAIRS, {*_PAIRS, "num_tokens"}),
    "KTO": (LABELS, {"entropy", "rewards/margins", "kl", "num_tokens", *_SIDES}),
    "Reward": (PAIRS, {*_SCORES, "num_tokens"}),
    "GRPO": ([{"prompt": ask} for ask in ASK], {"entropy", "kl", *_CLIP}),
    "RLOO": ([{"prompt": ask} for ask in ASK], {"entropy", "kl", *_CLIP}),
}


def letters(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


@pytest.mark.parametrize("kind", LOGGED)
def test_the_log_has_the_entries_of_trl(kind: str, tiny: Path, tmp_path: Path) -> None:
    rows, names = LOGGED[kind]
    given: dict[str, Any] = {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
    more: dict[str, Any] = {}
    if kind in ("GRPO", "RLOO"):
        given |= {"num_generations": 4, "max_completion_length": 4, "beta": 0.1, "per_device_train_batch_size": 8}
        more["reward_funcs"] = letters
    args = getattr(verl.trl, f"{kind}Config")(str(tmp_path), **given)
    trainer = getattr(verl.trl, f"{kind}Trainer")(str(tiny), args=args, train_dataset=rows, **more)
    trainer.train()
    entry = next(entry for entry in trainer.state.log_history if "grad_norm" in entry)
    assert names <= entry.keys()
    speed = {"runtime", "samples_per_second", "steps_per_second"}
    assert {f"eval_{name}" for name in {*names, *speed, "num_tokens"}} <= trainer.evaluate(rows).keys()


@pytest.mark.parametrize(
    ("name", "measure", "names", "options"),
    [
        ("sft", entries.of_tokens, {"entropy", "mean_token_accuracy"}, {}),
        ("kto", entries.of_sides, {"entropy", "rewards/margins", *_SIDES}, {}),
        ("dpo", entries.of_pairs, _PAIRS, {}),
        ("reward_model", entries.of_scores, _SCORES, {}),
        ("grpo", entries.of_clipped, {"entropy", *_CLIP}, {}),
        ("grpo", entries.of_clipped, {"entropy", "kl", *_CLIP}, {"kl_in": "loss", "entropy_coeff": 0.1}),
        ("rloo", entries.of_clipped, {"entropy", *_CLIP}, {"ratio_of": "sequence"}),
        ("gspo", entries.of_clipped, {"entropy", *_CLIP}, {}),
        ("cispo", entries.of_clipped_weights, {"entropy", "cispo_clip_ratio"}, {}),
        ("vespo", entries.of_soft_weights, {"entropy", "vespo/phi_seq_mean"}, {}),
        ("sapo", entries.of_policy, {"entropy"}, {}),
    ],
)
def test_entries_cost_no_forward_pass_and_move_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, measure: FurtherMetrics, names: set[str], options: dict[str, Any]
) -> None:
    forwards, forward = [], Forward.forward
    monkeypatch.setattr(Forward, "forward", lambda *args: (forwards.append(1), forward(*args))[1])
    algorithm, batch = prepared(name, 3, **options)
    plain, moved = update(algorithm.objective("actor"), batch, None)
    before = len(forwards)
    algorithm.further_metrics = measure
    measured, moved_too = update(algorithm.objective("actor"), batch, None)
    assert torch.equal(moved, moved_too) and len(forwards) == 2 * before
    found = entries.whole(measured)
    assert {key: found[key] for key in plain} == plain and names <= found.keys() - plain.keys()
    divided = entries.whole(update(algorithm.objective("actor"), batch, 2)[0])
    assert {key: divided[key] for key in names} == pytest.approx({key: found[key] for key in names}, rel=1e-4, abs=1e-6)


def test_the_kl_of_a_policy_far_from_its_reference_is_that_of_trl(tiny: Path, tmp_path: Path) -> None:
    args = verl.trl.GRPOConfig(str(tmp_path), beta=0.1, num_generations=4, save_strategy="no", report_to="none")
    trainer = verl.trl.GRPOTrainer(str(tiny), letters, args, train_dataset=[{"prompt": ask} for ask in ASK])
    (task,) = trainer.trainer.tasks.values()
    algorithm, (_, batch) = task.algorithm, prepared("grpo", 3, kl_in="loss")
    log_probs = batch.tensor("old_log_probs").requires_grad_()
    distances = torch.linspace(-30, 30, len(log_probs), dtype=torch.float64)
    reference = log_probs.detach() + distances
    x = loss_input(
        algorithm,
        batch.drop(["ref_log_probs"]).add({"ref_log_probs": (reference, batch.lengths("response_tokens"))}),
        log_probs=log_probs,
        entropy=torch.zeros(len(log_probs)),
    )
    kl = torch.exp(reference - log_probs) - (reference - log_probs) - 1
    logged = entries.of_policy(algorithm, x)["sum/kl"]
    torch.testing.assert_close(logged, (kl * x.mask).sum().detach(), check_dtype=False)
    loss = algorithm.compute_loss(x)
    wanted = (x.weights * x.columns["kl_coef"][x.sequence] * kl).sum()
    torch.testing.assert_close(loss.metrics["loss/kl"], wanted.detach(), check_dtype=False)
