"""Gradients of every algorithm at 1, 2 and 3 ranks, over other micro-batches and orders of the rows; a job of 3 ranks.

Prints one line of JSON a case: how far the gradient and the metrics are from those of one process.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from tests.algorithms.support import prepared
from tests.algorithms.test_invariance import VARIANTS
from verl.algorithms.base import RoleObjective
from verl.batch import Batch
from verl.cluster.rank_context import RankContext
from verl.models.heads import ValueModel
from verl.training.options import EngineOptions, OptimConfig, layout_of
from verl.weights.layout import Mesh
from verl.workers.streams import gathered
from verl.workers.trained import train_engine
from verl.workers.update import MiniBatchPlan, TaskLoss, run_updates

# Without momentum the first moment after a step is the gradient.
OPTIM = OptimConfig(betas=(0.0, 0.9), max_grad_norm=None)


def model(head: str) -> Any:
    """GPT-2: its norms are fp64 in an fp64 model, and its head is tied to its embedding."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=16, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    net = GPT2LMHeadModel(config).to(torch.float64)
    return net if head == "lm" else ValueModel.from_model(net)


def gradient(
    objective: RoleObjective, batch: Batch, group: Any, rows: int | None, strategy: Any = "ddp"
) -> tuple[torch.Tensor, Any]:
    head: Any = objective.algorithm.head if objective.role == "actor" else "value"
    options = EngineOptions(optim=OPTIM, micro_batch_size=rows, strategy=strategy)
    ranks = [0] if group is None else dist.get_process_group_ranks(group)
    context = RankContext(meshes={"train": Mesh(tuple(ranks), layout_of(options, len(ranks)))}, groups={"train": group})
    engine = train_engine(model(head), options, head, context)
    metrics = run_updates(engine, [TaskLoss(batch, objective)], MiniBatchPlan(), 0)
    assert metrics["update/skipped"] == 0
    state = {shard.name: shard.tensor for shard in gathered(engine.state()[0], group)}
    return torch.cat([state[name].flatten() for name in sorted(state) if name.endswith(".exp_avg")]), metrics


def compare(name: str, options: dict[str, Any], groups: dict[int, Any], seed: int) -> None:
    algorithm, batch = prepared(name, seed, **options)
    choose = random.Random(seed)
    for role in sorted(algorithm.roles & {"actor", "critic", "cost_critic"}):
        objective = algorithm.objective(role)
        expected, known = gradient(objective, batch, None, None)
        for ranks, strategy in ((1, "ddp"), (2, "ddp"), (3, "ddp"), (3, "fsdp")):
            shuffled = batch.take(choose.sample(range(len(batch)), len(batch)))
            rows = choose.choice([None, 1, 2, 3])
            if dist.get_rank() >= ranks:
                continue
            found, metrics = gradient(objective, shuffled, groups[ranks], rows, strategy)
            line = {
                "case": f"{name} {options} {role}, seed {seed}, {strategy} x {ranks}, micro-batches of {rows} rows",
                "gradient": float((found - expected).norm() / max(float(expected.norm()), 1e-100)),
                "metrics": max(abs(metrics[key] - value) / (1 + abs(value)) for key, value in known.items()),
                "names": sorted(metrics) == sorted(known),
            }
            if dist.get_rank() == 0:
                sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    by_size = {1: None, 2: dist.new_group([0, 1]), 3: dist.new_group([0, 1, 2])}
    for seed, (name, options) in enumerate(VARIANTS):
        if name not in sys.argv[1:]:
            continue
        compare(name, options, by_size, seed)
    dist.destroy_process_group()
