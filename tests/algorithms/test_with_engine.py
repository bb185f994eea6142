"""Every algorithm through the real engine on a tiny transformer: columns arrive, and micro-batches change nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.algorithms.support import OFFLINE, ONLINE, prepared
from tests.training.cases import make_engine
from verl.algorithms.base import RoleObjective
from verl.algorithms.loss_terms import LossNeeds, LossTerm
from verl.batch import Batch
from verl.models.heads import ValueModel
from verl.training.options import OptimConfig
from verl.workers.update import MiniBatchPlan, TaskLoss, run_updates


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def update(
    objective: RoleObjective, batch: Batch, micro_batch_size: int | None
) -> tuple[dict[str, float], torch.Tensor]:
    head = objective.algorithm.head if objective.role == "actor" else "value"
    net = model() if head == "lm" else ValueModel.from_model(model())
    before = copy.deepcopy(list(net.parameters()))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    engine = make_engine(net, optimizer=optimizer, head=head, micro_batch_size=micro_batch_size)  # type: ignore[arg-type]
    metrics = run_updates(engine, [TaskLoss(batch, objective)], MiniBatchPlan(), 0)
    moved = [(new - old).flatten() for new, old in zip(net.parameters(), before, strict=True)]
    return metrics, torch.cat(moved).detach()


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in (*ONLINE, *OFFLINE)),
        ("grpo", {"kl_in": "loss", "entropy_coeff": 0.01}),
        ("safe_rlhf", {"baseline": "critics"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_one_update(name: str, options: dict[str, object]) -> None:
    algorithm, batch = prepared(name, 3, **options)
    for role in sorted(algorithm.roles & {"actor", "critic", "cost_critic"}):
        objective = algorithm.objective(role)
        metrics, whole = update(objective, batch, None)
        assert metrics["update/skipped"] == 0
        assert whole.any()
        _, parts = update(objective, batch, 2)
        assert torch.allclose(whole, parts, rtol=1e-4, atol=1e-6)


def test_the_optimizer_of_the_engine_takes_the_same_objective() -> None:
    algorithm, batch = prepared("ppo", 3)
    engine = make_engine(model(), optim=OptimConfig())
    part = LossTerm(
        batch, algorithm.compute_loss, algorithm.token_weights(batch), LossNeeds(columns=algorithm.loss_columns)
    )
    metrics = engine.update([part])
    assert {"loss/policy", "policy/kl", "policy/clip_fraction", "loss", "grad_norm"} <= metrics.keys()
