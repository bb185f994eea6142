"""Updates of ranks with the rows whose gradient is 0 and without them, for several layouts; a job of 4 ranks, for ZeRO
of 2.

Prints one line of JSON a case: how far the weights are apart, and the rows that were left out. The argument is the list
of cases to run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.training.cases import OPTIM, tiny_model
from tests.training.zero_advantage_steps import GROUP, KL, farthest, prepared_steps, stepped
from verl.algorithms import BaseAlgorithm
from verl.batch import Batch
from verl.cluster.rank_context import RankContext
from verl.models.heads import ValueModel
from verl.training.engine import TrainEngine
from verl.training.forward import Forward
from verl.training.options import EngineOptions, layout_of
from verl.training.torch_engine import TorchEngine
from verl.weights.layout import Layout, Mesh
from verl.workers.streams import gathered
from verl.workers.trained import train_engine

#: Steps of four prompts with 1, 0, 3 and 2 groups that are computed; the second has all rows alike.
FOUR = ((True, False, True, True), (True, True, True, True), (False, True, False, False), (False, True, True, False))
SMOOTH = OPTIM.replace(adam_eps=1e-4)


@dataclass(frozen=True)
class Case:
    """A kind of model in a layout, the algorithms that train it together, their options, and the role."""

    kind: str
    layout: Layout
    tasks: tuple[str, ...] = ("grpo",)
    role: str = "actor"
    options: tuple[tuple[str, Any], ...] = ()

    def engine(self, group: Any) -> TrainEngine:
        model: Any = tiny_model(self.kind, layers=4)
        model = ValueModel.from_model(model) if self.role == "critic" else model
        options = EngineOptions(optim=SMOOTH, micro_batch_size=GROUP)
        mesh = Mesh(tuple(range(self.layout.size)), self.layout)
        return TorchEngine(model, options, head="lm" if self.role == "actor" else "value", mesh=mesh, group=group)


@dataclass(frozen=True)
class Zero:
    """A stage of DeepSpeed's ZeRO, in fp32."""

    stage: int
    tasks: tuple[str, ...] = ("grpo",)
    role: str = "actor"
    options: tuple[tuple[str, Any], ...] = ()

    def engine(self, group: Any) -> TrainEngine:
        settings = {"strategy": "deepspeed", "deepspeed_config": {"zero_stage": self.stage}}
        options = EngineOptions.of({"optim": SMOOTH, "micro_batch_size": GROUP, **settings}, "train")
        context = RankContext(meshes={"train": Mesh((0, 1), layout_of(options, 2))}, groups={"train": group})
        return train_engine(tiny_model("llama", torch.float32), options, "lm", context)


@dataclass(frozen=True)
class Megatron:
    """Megatron-LM's layers in a layout."""

    layout: Layout
    tasks: tuple[str, ...] = ("grpo",)
    role: str = "actor"
    options: tuple[tuple[str, Any], ...] = ()

    def engine(self, group: Any) -> TrainEngine:
        mesh = Mesh(tuple(range(self.layout.size)), self.layout)
        parts = {ranks: dist.new_group([*ranks]) for ranks in mesh.parts()} | {mesh.ranks: group}
        options = EngineOptions(
            optim=SMOOTH,
            micro_batch_size=GROUP,
            strategy="megatron",
            tensor_parallel_size=self.layout.tp,
            pipeline_parallel_size=self.layout.pp,
        )
        context = RankContext(meshes={"train": mesh}, groups={"train": group}, parts=parts)
        return train_engine(tiny_model("llama", layers=4), options, "lm", context)


FSDP = Case("llama", Layout(shard=4))
CASES: dict[str, list[Case | Zero | Megatron]] = {
    "fast": [FSDP, Case("gpt2", Layout(tp=2, pp=2))],
    "layouts": [
        *(
            Case("gpt2", layout)
            for layout in (
                Layout(replicate=4), Layout(replicate=2, shard=2), Layout(shard=2, tp=2), Layout(replicate=2, pp=2),
                Layout(shard=2, pp=2), Layout(tp=4), Layout(pp=4), Layout(sp=4), Layout(shard=2, sp=2),
            )
        ),
        Case("qwen3_moe", Layout(ep=4)),
        Case("qwen3_moe", Layout(shard=2, ep=2)),
    ],
    "several": [
        *(Case("llama", layout, ("grpo", "ppo", "rloo")) for layout in (Layout(shard=4), Layout(replicate=2, pp=2))),
        *(Case("llama", Layout(shard=2, tp=2), ("ppo",), role) for role in ("actor", "critic")),
        Case("llama", Layout(shard=4), ("gmpo",), options=tuple(KL.items())),
    ],
    "megatron": [
        Megatron(layout) for layout in (Layout(replicate=2, tp=2), Layout(replicate=2, pp=2), Layout(tp=2, pp=2))
    ],
    "zero": [Zero(stage) for stage in (1, 2, 3)],
}  # fmt: skip


def forwards_of(engine: TrainEngine, run: Callable[[], Any]) -> list[int]:
    """Forward passes of this rank."""
    count, pack = [0], Forward.pack

    def counted(*args: Any) -> Any:
        count[0] += 1
        return pack(*args)

    Forward.pack = counted  # type: ignore[method-assign]
    try:
        run()
    finally:
        Forward.pack = pack  # type: ignore[method-assign]
    return count


def whole(engine: TrainEngine, group: Any) -> dict[str, Tensor]:
    return {shard.name: shard.tensor.clone() for shard in gathered(engine.shards(), group)}


def without_weight(algorithm: BaseAlgorithm, batch: Batch) -> int:
    """Rows whose weights are all 0."""
    return sum(not part.any() for part in algorithm.token_weights(batch).split(batch.lengths("response_tokens")))


def compare(case: Case | Zero | Megatron, group: Any) -> Iterator[tuple[str, Any]]:
    options = dict(case.options)
    tasks = [prepared_steps(name, FOUR, rejected=case.tasks == ("ppo",), **options) for name in case.tasks]
    found, forwards = [], []
    for skip in (True, False):
        engine = case.engine(group)
        run = lambda engine=engine, is_on=skip: found.append(  # noqa: E731
            stepped(engine, tasks, role=case.role, skip=is_on, whole=lambda e: whole(e, group))
        )
        forwards.append(forwards_of(engine, run)[0])
        in_step = engine.parallel.lockstep
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, forwards[0], group=group)
    yield "apart", farthest(found[0].weights, found[1].weights)
    yield "within", 1e-5 if isinstance(case, Zero) else 1e-12
    yield "left_out", [metrics["update/rows_left_out"] for metrics in found[0].metrics]
    yield "steps", [metrics["update/steps"] for metrics in found[0].metrics]
    yield "forwards", len({*counts}) if in_step else 1
    yield "fewer", forwards[0] < forwards[1]
    yield "norms", [metrics["grad_norm"] for metrics in found[0].metrics]
    alike = [sum(groups) * GROUP for groups in FOUR]
    # Whitened advantages are not 0, and with KL more than they counts.
    by_task = [
        [without_weight(algorithm, batch) for batch in batches] if algorithm.name == "ppo" or options else alike
        for algorithm, batches in tasks
    ]
    yield "expected", [sum(rows) for rows in zip(*by_task, strict=True)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    everyone = dist.new_group([*range(dist.get_world_size())])
    for one_case in CASES[sys.argv[1]]:
        line = {"case": str(one_case), **dict(compare(one_case, everyone))}
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps(line) + "\n")
    dist.destroy_process_group()
