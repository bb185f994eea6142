"""Neither the cut into micro-batches nor the order of rows changes a gradient (fp64)."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms.support import OFFLINE, ONLINE, loss_input, prepared
from tests.properties import examples
from verl.algorithms.base import RoleObjective
from verl.batch import Batch

VARIANTS = [
    *((name, {}) for name in (*ONLINE, *OFFLINE)),
    *((name, {"loss_agg_mode": mode}) for name in ("grpo", "gspo") for mode in ("token-sum", "seq-mean-token-sum")),
    ("grpo", {"kl_in": "loss", "entropy_coeff": 0.1, "rollout_is": "sequence", "rollout_rs": "seq_mean_k3"}),
    ("gmpo", {"rollout_is_normalize": True}),
    ("safe_rlhf", {"baseline": "critics"}),
    *(("dpo", {"loss_type": loss}) for loss in ("hinge", "nca_pair", "sppo_hard", "apo_down", "discopop", "aot")),
    ("dpo", {"loss_type": "exo_pair", "label_smoothing": 0.01}),
]


def gradients(
    objective: RoleObjective, batch: Batch, parts: list[list[int]], seed: int
) -> tuple[float, list[torch.Tensor]]:
    """Summed loss and its gradients over micro-batches."""
    torch.manual_seed(seed)
    outputs = {}
    role, head = objective.role, objective.algorithm.head
    tokens = sum(batch.lengths("response_tokens"))
    names = ["values"] if role != "actor" else ["scores"] if head == "score" else ["log_probs"]
    for name in [*names, *(["entropy"] if objective.loss_needs.entropy else [])]:
        size = len(batch) if name == "scores" else tokens
        outputs[name] = (-torch.rand(size, dtype=torch.float64) - 0.05).requires_grad_()
    total = 0.0
    for rows in parts:
        loss = objective.compute_loss(loss_input(objective, batch, rows, **outputs)).total
        total += float(loss.detach())
        loss.backward()
    return total, [leaf.grad for leaf in outputs.values() if leaf.grad is not None]


def random_parts(batch: Batch, coupled: bool, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    units = batch.group_indices() if coupled else [[row] for row in range(len(batch))]
    units = [rng.sample(unit, len(unit)) for unit in units]
    rng.shuffle(units)
    parts: list[list[int]] = [[]]
    for unit in units:
        if parts[-1] and rng.random() < 0.5:
            parts.append([])
        parts[-1] += unit
    return parts


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(VARIANTS)])
@examples(12)
@given(seed=st.integers(0, 10_000))
def test_any_split_in_any_order_gives_one_gradient(name: str, options: dict[str, object], seed: int) -> None:
    algorithm, batch = prepared(name, seed % 7, **options)
    roles = [role for role in ("actor", "critic", "cost_critic") if role in algorithm.roles]
    for role in roles:
        objective = algorithm.objective(role)
        whole, expected = gradients(objective, batch, [list(range(len(batch)))], seed)
        parts = random_parts(batch, objective.loss_needs.coupled, seed)
        total, got = gradients(objective, batch, parts, seed)
        assert total == pytest.approx(whole, rel=1e-10, abs=1e-12)
        for mine, theirs in zip(got, expected, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-14)
