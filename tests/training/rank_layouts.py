"""Models over many layouts, and their weights and state in another layout; a job of 4 ranks.

Prints one line of JSON a case: how far it is from one process. The argument is the list of cases to run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tests.algorithms.support import prepared
from tests.training.cases import OPTIM, ROWS, part, ragged_batch, tiny_model
from tests.training.test_parts import two_parts
from verl.algorithms import BaseAlgorithm, LossInput
from verl.batch import Batch
from verl.models.heads import ValueModel
from verl.models.lora import add_lora
from verl.models.options import LoraOptions
from verl.training.engine import Metrics, TrainEngine
from verl.training.options import EngineOptions, Head
from verl.training.torch_engine import TorchEngine
from verl.weights.layout import DIMS, Layout, Mesh
from verl.weights.shard import Shard
from verl.workers.streams import gathered
from verl.workers.update import MiniBatchPlan, TaskLoss, run_updates

#: Metrics that do not depend on how rows are put into micro-batches.
SUMS = ("loss", "grad_norm", "tokens", "squares")


@dataclass(frozen=True)
class Case:
    """A kind of model in a layout.

    Attributes:
        task: two losses that use all that there is ("all"), one of a row, so that some ranks have none ("one row"),
            or an algorithm and the role that is trained.
        then: the layout that weights and state are loaded in.
        lora: adapters are trained in the place of the weights.
        padded: the cut model computes on padded rows.
        layers, steps: of the model, and before its weights and state go on.
    """

    kind: str
    layout: Layout
    then: Layout
    task: str = "all"
    dtype: torch.dtype = torch.float64
    checkpointing: bool = False
    lora: bool = False
    padded: bool = False
    layers: int = 4
    steps: int = 3

    @property
    def head(self) -> Head:
        return "value" if self.task.endswith("critic") else "lm"

    def engine(self, layout: Layout, group: Any = None) -> TorchEngine:
        model: Any = tiny_model(self.kind, self.dtype, layers=self.layers)
        if self.lora:
            add_lora(model, LoraOptions(r=2))
        options = EngineOptions(
            optim=OPTIM,
            micro_batch_size=2,
            gradient_checkpointing=self.checkpointing,
            remove_padding=layout.size == 1 or not self.padded,
        )
        mesh = Mesh(tuple(range(layout.size)), layout)
        model = ValueModel.from_model(model) if self.head == "value" else model
        return TorchEngine(model, options, head=self.head, mesh=mesh, group=group)

    def update(self, engine: TorchEngine) -> Metrics:
        return update_of(engine, self.task)

    def predict(self, engine: TorchEngine, batch: Batch) -> torch.Tensor:
        return outputs_of(engine, self.head, batch)


def statistics_of_tokens(algorithm: BaseAlgorithm, x: LossInput) -> dict[str, torch.Tensor | float]:
    statistics = {"entropy": x.entropy, "mean_logits": x.mean_logits, "is_top": x.is_top}
    return {f"seen/{name}": v.sum() / x.total_tokens for name, v in statistics.items() if v is not None}


def update_of(engine: TrainEngine, task: str) -> Metrics:
    """The update that a task asks for: by name, or "algorithm role"."""
    if task == "all":
        return engine.update(two_parts())
    if task == "one row":
        return engine.update([part(ragged_batch(ROWS[:1]), entropy=True)])
    name, role = task.split()
    algorithm, batch = prepared(name, seed=3)
    algorithm.further_metrics = statistics_of_tokens
    return run_updates(engine, [TaskLoss(batch, algorithm.objective(role))], MiniBatchPlan(), 0)


def outputs_of(engine: TrainEngine, head: Head, batch: Batch) -> torch.Tensor:
    want = {"lm": "log_probs", "value": "values"}[head]
    return engine.predict(batch, [want])[want]


KINDS = ("llama", "qwen2", "gpt2", "qwen3_moe")
TASKS = ("all", "grpo actor", "ppo actor", "ppo critic")
#: Each layout, and the one that its state goes on in.
LAYOUTS = (
    (Layout(shard=4), Layout(shard=2, pp=2)),
    (Layout(replicate=2, shard=2), Layout(shard=4)),
    (Layout(pp=4), Layout(replicate=2, pp=2)),
    (Layout(replicate=2, pp=2), Layout(tp=2, pp=2)),
    (Layout(shard=2, pp=2), Layout(pp=4)),
    (Layout(tp=2, pp=2), Layout(shard=2, tp=2)),
    (Layout(shard=2, tp=2), Layout(shard=2, sp=2)),
    (Layout(replicate=2, tp=2), Layout(shard=4)),
    (Layout(sp=2, tp=2), Layout(tp=2, pp=2)),
    (Layout(sp=4), Layout(replicate=2, tp=2)),
    (Layout(shard=2, sp=2), Layout(sp=4)),
    (Layout(replicate=2, sp=2), Layout(shard=2, sp=2)),
)
OF_EXPERTS = (
    (Layout(ep=4), Layout(replicate=2, ep=2)),
    (Layout(replicate=2, ep=2), Layout(shard=2, ep=2)),
    (Layout(shard=2, ep=2), Layout(ep=4)),
    (Layout(sp=2, ep=2), Layout(pp=2, ep=2)),
    (Layout(pp=2, ep=2), Layout(sp=2, ep=2)),
)
CASES = {
    "fast": [
        Case("llama", Layout(tp=2, pp=2), Layout(shard=2, tp=2), "ppo actor", layers=2, steps=2),
        Case("gpt2", Layout(shard=2, sp=2), Layout(replicate=2, shard=2), layers=2, steps=2),
    ],
    "mixed": [
        Case("gpt2", Layout(replicate=2, shard=2), Layout(shard=4)),
        Case("llama", Layout(pp=4), Layout(replicate=2, shard=2), checkpointing=True),
        Case("gpt2", Layout(shard=2, pp=2), Layout(replicate=2, pp=2), "ppo critic"),
        Case("qwen3_moe", Layout(replicate=2, pp=2), Layout(pp=4), "grpo actor"),
        Case("gpt2", Layout(tp=4), Layout(shard=2, tp=2)),
        Case("phi", Layout(replicate=2, tp=2), Layout(sp=2, tp=2), "ppo critic"),
        Case("phi3", Layout(shard=2, tp=2), Layout(replicate=2, tp=2), "grpo actor", checkpointing=True),
        Case("gpt2", Layout(shard=2, pp=2), Layout(replicate=2, tp=2), lora=True),
        Case("gpt2", Layout(replicate=2, sp=2), Layout(shard=2, sp=2), "ppo critic"),
        Case("qwen3_moe", Layout(shard=2, ep=2), Layout(ep=4)),
        Case("gpt2", Layout(tp=2, pp=2), Layout(shard=2, pp=2), padded=True),
    ],
    **{f"{kind} {task}": [Case(kind, *way, task) for way in LAYOUTS] for kind in KINDS for task in TASKS},
    **{
        f"experts {task}": [Case(kind, *way, task) for way in OF_EXPERTS for kind in ("qwen3_moe", "mixtral")]
        for task in TASKS
    },
    "tp4 and a window": [
        *(Case("gpt2", Layout(tp=4), Layout(sp=4), task) for task in TASKS),
        Case("window", Layout(sp=4), Layout(sp=4)),
    ],
    "one row": [Case("qwen3_moe", *way, "one row") for way in LAYOUTS + OF_EXPERTS if way[0].data_size > 1],
    **{f"fp32 {kind}": [Case(kind, layout, layout, dtype=torch.float32) for layout, _ in LAYOUTS] for kind in KINDS},
}


def compare(case: Case, group: Any) -> Iterator[tuple[str, Any]]:
    """What is found of a case by name; the model of one process is on rank 0 alone."""
    is_first = dist.get_rank() == 0
    one, cut = case.engine(Layout()) if is_first else None, case.engine(case.layout, group)
    batch = ragged_batch(ROWS)
    index, _ = cut.mesh.rows(dist.get_rank()) or (0, 1)
    mine = batch.take([0, 1, 2]) if index % 2 else batch  # ranks with unequal numbers of forwards
    found = [case.update(cut) for _ in range(case.steps)]
    weights = [Shard.whole(shard.name, shard.tensor.clone()) for shard in gathered(cut.shards(), group)]
    predicted = case.predict(cut, mine)
    again = case.engine(case.then, group)
    state, meta = cut.state()
    again.load_shards(weights)
    again.load_state(gathered(state, group), meta)
    resumed = [case.update(engine) for engine in (cut, again)]
    yield "resumed", max(abs(resumed[0][key] - resumed[1][key]) for key in SUMS if key in resumed[0])
    yield "cuts", sorted({dim for spec in cut.weights.specs.values() for dim, *_ in spec.sharded_dims}, key=DIMS.index)
    if one is not None:
        metrics = [case.update(one) for _ in found]
        expected = {shard.name: shard.tensor for shard in one.shards()}
        total = sum(tensor.numel() for tensor in expected.values())
        same = [key for key in metrics[0] if case.task.endswith(("actor", "critic")) or key in SUMS]
        yield "gradient", min(step["grad_norm"] for step in metrics)
        yield "metrics", apart(case, metrics, found, same)
        yield "weights", max(float((shard.tensor - expected[shard.name]).abs().max()) for shard in weights)
        yield (
            "names",
            [*expected] == [*cut.weights.specs] and sorted(expected) == sorted(shard.name for shard in weights),
        )
        yield "predicted", float((predicted - case.predict(one, mine)).abs().max())
        yield "held", sum(shard.tensor.numel() for shard in cut.shards()) / total


def apart(case: Case, one: list[Metrics], other: list[Metrics], names: list[str]) -> float:
    """The largest difference of metrics over the steps; of fp32 after the first step relative for those above 1, since
    AdamW turns the rounding of small gradients into steps of its own size."""
    found = 0.0
    for step, (a, b) in enumerate(zip(one, other, strict=True)):
        for name in names:
            size = max(1.0, abs(a[name])) if step and case.dtype == torch.float32 else 1.0
            found = max(found, abs(a[name] - b[name]) / size)
    return found


def run(case: Case, group: Any) -> None:
    sizes = {dim: size for dim, size in case.layout.sizes.items() if size > 1}
    line = {"case": f"{case.kind} {case.task} {case.dtype} {sizes} -> {case.then}", "sizes": sizes}
    line |= dict(compare(case, group))
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    all_ranks = dist.new_group([0, 1, 2, 3])
    for one_case in CASES[sys.argv[1]]:
        run(one_case, all_ranks)
    dist.destroy_process_group()
