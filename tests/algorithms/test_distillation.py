"""On-policy distillation: its gradient is that of the reverse KL, and a policy comes nearer to its teacher."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import verl
from tests.algorithms.support import loss_input
from tests.trainer.cases import PROMPTS
from verl.algorithms import make_algorithm
from verl.batch import Batch
from verl.errors import DataError


def test_the_mean_gradient_is_that_of_the_reverse_kl() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(7, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits)
    found, kl, chances = torch.zeros_like(exact), 0.0, policy.detach().exp()
    algorithm = make_algorithm("distillation")
    for token in range(7):
        columns = {"response_tokens": [[token]], "rollout_log_probs": [[float(policy[token].detach())]]}
        batch = Batch.from_columns({"group": ["a"], **columns, "ref_log_probs": [[float(teacher[token])]]})
        prepared, metrics = algorithm.prepare(batch)
        log_probs = logits.log_softmax(0)[token : token + 1]
        loss = algorithm.compute_loss(loss_input(algorithm, prepared, log_probs=log_probs)).total
        found += chances[token] * torch.autograd.grad(loss, logits)[0]
        kl += float(chances[token]) * metrics["kl"]
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-8)
    assert kl == pytest.approx(float((chances * (policy.detach() - teacher)).sum()))


def test_a_log_ratio_is_bounded() -> None:
    columns = {
        "group": ["a"],
        "response_tokens": [[1, 2]],
        "log_probs": [[-1.0, -1.0]],
        "ref_log_probs": [[-50.0, -0.5]],
    }
    advantages = make_algorithm("distillation").prepare(Batch.from_columns(columns))[0]["advantages"]
    assert advantages == [[-10.0, pytest.approx(0.5)]]
    unbounded = make_algorithm("distillation", max_log_ratio=None).prepare(Batch.from_columns(columns))[0]
    assert unbounded["advantages"] == [[-49.0, pytest.approx(0.5)]]
    with pytest.raises(DataError, match="ref_log_probs"):
        make_algorithm("distillation").prepare(Batch.from_columns(columns).drop(["ref_log_probs"]))


def test_a_token_that_the_policy_left_far_behind_still_has_a_gradient() -> None:
    columns = {"group": ["a"], "response_tokens": [[1]], "log_probs": [[-31.0]], "ref_log_probs": [[-35.0]]}
    algorithm = make_algorithm("distillation")
    log_probs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    prepared = algorithm.prepare(Batch.from_columns(columns))[0]
    loss = algorithm.compute_loss(loss_input(algorithm, prepared, log_probs=log_probs)).total
    assert float(torch.autograd.grad(loss, log_probs)[0]) == pytest.approx(4 * math.exp(20.0))


@pytest.mark.slow
def test_a_policy_comes_nearer_to_its_teacher(tiny: Path, tmp_path: Path) -> None:
    taught = verl.Actor(str(tiny), optim={"lr": 1e-2})
    rows = [{"prompt": prompt, "completion": " said the fox"} for prompt in PROMPTS]
    verl.Trainer(taught, algorithm="sft", log_dir=False).fit([rows] * 15)
    taught.save_pretrained(str(tmp_path / "teacher"))
    curves = {}
    for lr in (1e-2, 0.0):
        actor = verl.Actor(str(tiny), optim={"lr": lr}, sampling={"max_new_tokens": 8, "ignore_eos": True})
        actor.make_reference(str(tmp_path / "teacher"))
        trainer = verl.Trainer(actor, algorithm="distillation", n=32, log_dir=False)
        records = [trainer.step(PROMPTS) for _ in range(30 if lr else 5)]
        assert "reward" not in records[0]
        curves[lr] = [record["kl"] for record in records]
    learned, control = (sum(curves[lr][-5:]) / 5 for lr in (1e-2, 0.0))
    assert control > 1 and learned < 0.7 * control
