"""Megatron-LM's layers beside one process of `TorchEngine`, and weights and state in other layouts and engines; a job
of 4 ranks, or of the 2 that the first list takes.

Prints one line of JSON a case: how far it is from one process. Arguments: the list of cases to run, and a
directory for their checkpoints.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.trainer.rank_checkpoints import load, save
from tests.training.cases import OPTIM, ROWS, ragged_batch, tiny_model
from tests.training.rank_layouts import SUMS, apart, outputs_of, update_of
from verl.batch import Batch
from verl.cluster.rank_context import RankContext
from verl.models.heads import ValueModel
from verl.training.engine import Metrics, TrainEngine
from verl.training.options import EngineOptions, Head
from verl.weights.layout import DIMS, Layout, Mesh
from verl.weights.shard import Shard
from verl.workers.streams import gathered
from verl.workers.trained import train_engine

Dtype = torch.dtype
#: Process groups by their ranks.
Groups = dict[tuple[int, ...], Any]
#: Each layout, and the one that its state goes on in, under Megatron and under torch alone.
LAYOUTS = {
    "tp2": (Layout(tp=2), Layout(pp=2)),
    "pp2": (Layout(pp=2), Layout(tp=2)),
    "tp2 pp2": (Layout(tp=2, pp=2), Layout(replicate=2, tp=2)),
    "dp2 tp2": (Layout(replicate=2, tp=2), Layout(tp=2, pp=2)),
    "dp2 pp2": (Layout(replicate=2, pp=2), Layout(tp=2)),
}
TASKS = ("all", "grpo actor", "ppo actor", "ppo critic")


class Case(NamedTuple):
    """A kind of model of 4 layers in a layout, and its loss: one that uses all there is ("all"), one of one
    row ("one row"), or that of an algorithm and the role that it trains."""

    kind: str
    layout: str
    task: str = "all"
    dtype: Dtype = torch.float64
    checkpointing: bool = False

    @property
    def head(self) -> Head:
        return "value" if self.task.endswith("critic") else "lm"

    def engine(self, layout: Layout, groups: Groups | None = None, strategy: str = "ddp") -> TrainEngine:
        options = EngineOptions(
            optim=OPTIM,
            micro_batch_size=2,
            strategy=strategy,  # type: ignore[arg-type]
            gradient_checkpointing=self.checkpointing,
            tensor_parallel_size=layout.tp,
            pipeline_parallel_size=layout.pp,
        )
        model: Any = tiny_model(self.kind, self.dtype, layers=4)
        model = ValueModel.from_model(model) if self.head == "value" else model
        if groups is None:
            return train_engine(model, options, self.head)
        mesh = Mesh(tuple(range(layout.size)), layout)
        group = groups[mesh.ranks]
        context = RankContext(meshes={"train": mesh}, groups={"train": group}, parts=groups)
        return train_engine(model, options, self.head, context)

    def update(self, engine: TrainEngine) -> Metrics:
        return update_of(engine, self.task)

    def predict(self, engine: TrainEngine, batch: Batch) -> torch.Tensor:
        return outputs_of(engine, self.head, batch)


KINDS = ("llama", "qwen2", "qwen3")
CASES = {
    "fast": [
        Case("llama", "tp2", "grpo actor"),
    ],
    "mixed": [
        Case("qwen2", "tp2 pp2", "all", checkpointing=True),
        Case("qwen3", "dp2 tp2", "ppo critic"),
    ],
    **{f"{kind} {task}": [Case(kind, layout, task) for layout in LAYOUTS] for kind in KINDS for task in TASKS},
    "one row and a window": [*(Case("qwen3", layout, "one row") for layout in LAYOUTS), Case("window", "tp2 pp2")],
    "checkpointing": [Case("llama", layout, checkpointing=True) for layout in LAYOUTS],
    **{f"fp32 {kind}": [Case(kind, layout, dtype=torch.float32) for layout in LAYOUTS] for kind in KINDS},
    # Weights in 16 bits go on from their masters.
    "bf16": [Case(kind, "tp2 pp2", dtype=torch.bfloat16) for kind in KINDS],
}


def whole(shards: Any, group: Any) -> dict[str, torch.Tensor]:
    return {shard.name: shard.tensor.clone() for shard in gathered(shards, group)}


def farthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def moved(weights: Any, state: Any, meta: Any, other: TrainEngine) -> TrainEngine:
    """Another engine with the weights and the state of the first, which are whole."""
    other.load_shards(Shard.whole(*item) for item in weights.items())
    other.load_state([Shard.whole(*item) for item in state.items()], meta)
    return other


def compare(case: Case, groups: Groups, folder: Path) -> dict[str, Any]:
    layout, then = LAYOUTS[case.layout]
    if dist.get_rank() >= layout.size:
        return {}
    group = groups[tuple(range(layout.size))]
    one, megatron = case.engine(Layout()), case.engine(layout, groups, "megatron")
    batch = ragged_batch(ROWS)
    index, _ = megatron.mesh.rows(dist.get_rank()) or (0, 1)
    mine = batch.take([0, 1, 2]) if index % 2 else batch  # ranks with unequal numbers of forwards
    metrics = [[case.update(engine) for _ in range(3)] for engine in (one, megatron)]
    expected, found = whole(one.shards(), None), whole(megatron.shards(), group)
    predicted = [case.predict(engine, mine) for engine in (one, megatron)]
    kept = whole(megatron.state()[0], group)
    state, meta = one.state()
    alone = whole(state, None)
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier(group)
    save(megatron, folder, group)  # type: ignore[arg-type]
    dist.barrier(group)
    others = [(group, case.engine(layout, groups)), (None, case.engine(Layout()))]
    if then.size == layout.size:
        others.append((group, case.engine(then, groups, "megatron")))
    for _, other in others:
        load(other, folder)  # type: ignore[arg-type]
    carried = [farthest(kept, whole(other.state()[0], of)) for of, other in others]
    others.append((group, moved(expected, alone, meta, case.engine(layout, groups, "megatron"))))
    carried.append(farthest(alone, whole(others[-1][1].state()[0], group)))
    resumed = [case.update(engine) for engine in (megatron, *(other for _, other in others))]
    same = [key for key in metrics[0][0] if case.task.endswith(("actor", "critic")) or key in SUMS]
    total = sum(tensor.numel() for tensor in expected.values())
    specs = megatron.weights.specs
    return {
        "gradient": min(step["grad_norm"] for step in metrics[0]),
        "metrics": apart(case, *metrics, same),  # type: ignore[arg-type]
        "weights": farthest(found, expected),
        "predicted": float((predicted[0] - predicted[1]).abs().max()),
        "resumed": max(abs(a[key] - resumed[0][key]) for a in resumed for key in SUMS if key in a),
        "others": len(others),
        "carried": max(carried),
        "names": [*specs] == [*one.weights.specs] and sorted(found) == sorted(expected),
        "cuts": sorted({dim for spec in specs.values() for dim, *_ in spec.sharded_dims}, key=DIMS.index),
        "held": sum(shard.tensor.numel() for shard in megatron.shards()) * layout.pp * layout.tp / total,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layouts = [layout for pair in LAYOUTS.values() for layout in pair if layout.size <= dist.get_world_size()]
    meshes = [Mesh(tuple(range(layout.size)), layout) for layout in layouts]
    several = dict.fromkeys(ranks for mesh in meshes for ranks in (mesh.ranks, *mesh.parts()))
    by_ranks: Groups = {ranks: dist.new_group(list(ranks)) for ranks in several}
    for number, one_case in enumerate(CASES[sys.argv[1]]):
        line = compare(one_case, by_ranks, Path(sys.argv[2]) / str(number))
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps({"case": str(one_case), **line}) + "\n")
            sys.stdout.flush()
        dist.barrier()
    dist.destroy_process_group()
