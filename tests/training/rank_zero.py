"""DeepSpeed's engine beside one process, and its checkpoints in another engine and back; a job of 2 ranks.

Prints one line of JSON a case: how far it is from one process. The argument is the list of cases to run.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.algorithms.support import prepared
from tests.training.cases import OPTIM, ROWS, part, ragged_batch, tiny_model
from verl.algorithms.loss_terms import Loss, LossInput
from verl.batch import Batch
from verl.cluster.rank_context import RankContext
from verl.models.heads import ValueModel
from verl.training.engine import Metrics, TrainEngine
from verl.training.options import EngineOptions, Head, layout_of
from verl.weights.layout import Mesh
from verl.weights.shard import Shard
from verl.workers.streams import gathered
from verl.workers.trained import train_engine
from verl.workers.update import MiniBatchPlan, TaskLoss, run_updates


class Case(NamedTuple):
    """A kind of model, a stage of ZeRO, and a loss that uses all that there is ("all") or an algorithm and its role."""

    kind: str
    stage: int
    task: str = "all"
    dtype: torch.dtype = torch.float32
    checkpointing: bool = False

    @property
    def head(self) -> Head:
        return "value" if self.task.endswith("critic") else "lm"

    def engine(self, group: Any, strategy: str) -> TrainEngine:
        size = 1 if group is None else 2
        zero = {"deepspeed_config": {"zero_stage": self.stage}} if strategy == "deepspeed" else {}
        optim = OPTIM.replace(moments="float32" if self.dtype == torch.bfloat16 else None)
        options = EngineOptions.of(
            {"optim": optim, "micro_batch_size": 2, "strategy": strategy, "gradient_checkpointing": self.checkpointing}
            | zero,
            "train",
        )
        model: Any = tiny_model(self.kind, self.dtype)
        model = ValueModel.from_model(model) if self.head == "value" else model
        context = RankContext(
            meshes={"train": Mesh(tuple(range(size)), layout_of(options, size))}, groups={"train": group}
        )
        return train_engine(model, options, self.head, context)

    def update(self, engine: TrainEngine) -> Metrics:
        if self.task == "all":
            return engine.update([part(ragged_batch(ROWS), entropy=True)])
        name, role = self.task.split()
        algorithm, batch = prepared(name, seed=3)
        return run_updates(engine, [TaskLoss(batch, algorithm.objective(role))], MiniBatchPlan(), 0)

    def predict(self, engine: TrainEngine, batch: Batch, **options: Any) -> Tensor:
        want = {"lm": "log_probs", "value": "values"}[self.head]
        return engine.predict(batch, [want], **options)[want]


CASES = {
    "fast": [Case("llama", 3, "grpo actor")],
    "llama": [
        *(Case("llama", *case) for case in product((1, 2, 3), ("all", "grpo actor", "ppo critic"))),
        Case("llama", 3, checkpointing=True),
    ],
    "gpt2": [Case("gpt2", *case) for case in product((1, 2, 3), ("all", "grpo actor", "ppo critic"))],
    "bf16": [Case("llama", stage, dtype=torch.bfloat16) for stage in (1, 2, 3)],
}


def not_finite(inputs: LossInput) -> Loss:
    predicted = inputs.values if inputs.log_probs is None else inputs.log_probs
    assert predicted is not None
    return Loss(total=predicted.sum() * torch.inf)


def whole(shards: Any, group: Any) -> dict[str, Tensor]:
    return {shard.name: shard.tensor.clone() for shard in gathered(shards, group)}


def farthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def moved(engine: TrainEngine, other: TrainEngine, group: Any) -> TrainEngine:
    """Another engine with the weights and the state of the first."""
    state, meta = engine.state()
    other.load_shards(Shard.whole(name, tensor) for name, tensor in whole(engine.shards(), group).items())
    other.load_state(gathered(state, group), meta)
    return other


def compare(case: Case, group: Any) -> dict[str, Any]:
    one, zero = case.engine(None, "ddp"), case.engine(group, "deepspeed")
    metrics = [[case.update(engine) for _ in range(3)] for engine in (one, zero)]
    batch = ragged_batch(ROWS)
    mine = batch.take([0, 1, 2]) if dist.get_rank() else batch  # ranks with unequal numbers of forwards
    before = whole(zero.shards(), group), whole(zero.state()[0], group)
    predicted = case.predict(zero, mine)
    base = float((predicted - case.predict(zero, mine, adapters=False)).abs().max())  # it has none
    skipped = zero.update([part(batch, not_finite)])
    after = whole(zero.shards(), group), whole(zero.state()[0], group)
    plain = moved(zero, case.engine(group, "ddp"), group)
    back = moved(plain, case.engine(group, "deepspeed"), group)
    resumed = [case.update(engine) for engine in (zero, plain, back)]
    expected = whole(one.shards(), None)
    return {
        "metrics": max(abs(a[key] - b[key]) for a, b in zip(*metrics, strict=True) for key in ("loss", "grad_norm")),
        "names": all(sorted(a) == sorted(b) for a, b in zip(*metrics, strict=True)),
        "moved": max(found["grad_norm"] for found in metrics[0]),
        "weights": farthest(before[0], expected),
        "predicted": float((predicted - case.predict(one, mine)).abs().max()),
        "base": base,
        "skipped": skipped["update/skipped"],
        "changed": max(farthest(*pair) for pair in zip(before, after, strict=True)),
        "resumed": max(abs(a[key] - resumed[0][key]) for a in resumed for key in ("loss", "grad_norm")),
        "after": farthest(whole(zero.shards(), group), whole(back.shards(), group)),
        "specs": {name: spec.shape for name, spec in zero.weights.specs.items()}
        == {n: t.shape for n, t in expected.items()},
        "held": sum(shard.tensor.numel() for shard in zero.shards()) / sum(t.numel() for t in expected.values()),
        "state": sum(shard.tensor.numel() for shard in zero.state()[0]) / sum(t.numel() for t in before[1].values()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    both = dist.new_group([0, 1])
    for one_case in CASES[sys.argv[1]]:
        line = compare(one_case, both)
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps({"case": str(one_case), **line}) + "\n")
            sys.stdout.flush()
    dist.destroy_process_group()
