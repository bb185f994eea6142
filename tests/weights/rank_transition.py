"""Weights of tiny models from the training into the generation layout and back; a job of several ranks.

Prints one line of JSON a case. The argument is the list of cases to run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel, Qwen2Config

from benchmarks.moved import MeasuredWeights, moved_bytes
from tests.training.cases import OPTIM, ROWS, log_probs, part, ragged_batch
from verl.errors import TrainingError
from verl.training.options import EngineOptions
from verl.training.torch_engine import TorchEngine
from verl.weights.layout import Layout, Mesh, generation_mesh
from verl.weights.plan import transition
from verl.weights.shard import Shard
from verl.weights.shards import named_weights
from verl.weights.transition import HybridWeights, Transfer
from verl.workers.streams import gathered

KINDS = ("llama", "qwen2", "gpt2")


@dataclass(frozen=True)
class Case:
    """A model, its training layout, and the stages and tensor-parallel ranks of generation.

    Attributes:
        bound: the weights go into a generation model that is laid out over its mesh.
    """

    kind: str
    layout: Layout
    pg: int = 1
    tg: int = 1
    bound: bool = False
    overlap: bool = True
    vocabulary: int = 64
    layers: int = 4

    def __str__(self) -> str:
        sizes = " ".join(f"{dim}={size}" for dim, size in self.layout.sizes.items() if size > 1)
        uneven = " uneven" if self.vocabulary % self.layout.tp else ""
        return f"{self.kind}{uneven} {sizes} -> pp={self.pg} tp={self.tg}"


def tiny_model(kind: str, vocabulary: int, layers: int) -> PreTrainedModel:
    """Of sizes that 8 ranks divide."""
    sizes = {"vocab_size": vocabulary, "hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 8}
    wide = {**sizes, "intermediate_size": 64, "num_key_value_heads": 8, "max_position_embeddings": 64}
    config: Any = {
        "llama": lambda: LlamaConfig(**wide, tie_word_embeddings=False),
        "qwen2": lambda: Qwen2Config(**wide, tie_word_embeddings=True),
        "gpt2": lambda: GPT2Config(vocab_size=vocabulary, n_embd=32, n_layer=layers, n_head=8, n_positions=64),
    }[kind]()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def layouts(size: int) -> list[tuple[Layout, int, int]]:
    """Every layout p-t-d with every pg and tg that divide it, and FSDP to whole and to tensor-parallel weights."""
    found = []
    counts = [n for n in (1, 2, 4, 8) if n <= size]
    for pp in [n for n in counts if n <= 4]:
        for tp in [n for n in counts if pp * n <= size]:
            layout = Layout(pp=pp, tp=tp, replicate=size // (pp * tp))
            if pp * tp > 1:
                found += [(layout, pg, tg) for pg in counts for tg in counts if pp % pg == 0 and tp % tg == 0]
    found += [(Layout(shard=size), 1, tg) for tg in counts]
    found += [(Layout(shard=size // 2, tp=2), 1, tg) for tg in (1, 2)]
    found += [(Layout(shard=2, replicate=size // 2), 1, 2), (Layout(pp=2, shard=size // 2), 1, 1)]
    return [*found, (Layout(sp=2, tp=size // 2), 1, 1)]


def cases(size: int, kinds: Iterable[str] = KINDS) -> list[Case]:
    found = [Case(kind, *layout, overlap=bool(i % 2)) for kind in kinds for i, layout in enumerate(layouts(size))]
    # Only a model that is cut over `tp` says how FSDP's weights are cut then.
    return [
        replace(case, bound=case.layout.tp < case.tg or (case.pg == 1 and i % 3 == 0)) for i, case in enumerate(found)
    ]


CASES = {
    "fast": [
        Case("llama", Layout(tp=4), 1, 2, bound=True, layers=2),
        Case("gpt2", Layout(tp=2, pp=2), 1, 1, layers=2),
        Case("qwen2", Layout(shard=4), 1, 2, bound=True, layers=2),
        # 53 rows are cut into 14, 14, 14, 11 and into 27, 26: not all training pieces are within the generation part.
        Case("qwen2", Layout(tp=4), 1, 2, vocabulary=53, layers=2),
    ],
    "4": [
        Case("qwen2", Layout(tp=2, pp=2), 2, 1, overlap=False),
        Case("gpt2", Layout(shard=2, tp=2), 1, 2, bound=True),
        Case("llama", Layout(shard=4), 1, 1, overlap=False),
    ],
    **{f"4 {kind}": cases(4, [kind]) for kind in KINDS},
    **{f"8 {kind} {part}": cases(8, [kind])[part::3] for kind in KINDS for part in range(3)},
}


def equal_to(whole: dict[str, Tensor], shards: Iterable[Shard]) -> bool:
    """Whether shards are blocks of whole weights, bit for bit, and there are some."""
    found = [
        torch.equal(
            s.tensor, whole[s.name][tuple(slice(a, a + n) for a, n in zip(s.offset, s.tensor.shape, strict=True))]
        )
        for s in shards
    ]
    return bool(found) and all(found)


def engine_of(case: Case, mesh: Mesh, group: Any, *, trains: bool) -> TorchEngine:
    options = EngineOptions(optim=OPTIM if trains else None)
    return TorchEngine(tiny_model(case.kind, case.vocabulary, case.layers), options, mesh=mesh, group=group)


def back(weights: HybridWeights, engine: TorchEngine, group: Any) -> None:
    """Load what generation has into a training engine whose weights are lost."""
    kept = [replace(shard, tensor=shard.tensor.clone()) for shard in weights.shards()]
    plan = weights.plan
    weights.release()
    for shard in engine.shards():
        shard.tensor.zero_()
    if engine.mesh.layout.pp == 1:  # what another rank generates with comes from there
        specs = {name: replace(spec, sharded_dims=plan.sharded_dims[name]) for name, spec in plan.specs.items()}
        reverse = transition(plan.target, plan.source, specs, {name: s.sharded_dims for name, s in plan.specs.items()})
        rank = dist.get_rank()
        buffers = {name: torch.empty(reverse.local_shape(rank, name), dtype=spec.dtype) for name, spec in specs.items()}
        Transfer(reverse, rank, group, kept, buffers, torch.device("cpu")).run()
        kept = [shard for name in buffers for shard in blocks(reverse, rank, name, buffers[name])]
    engine.load_shards(kept)


def blocks(plan: Any, rank: int, name: str, buffer: Tensor) -> Iterable[Shard]:
    for block in plan.blocks(rank, name):
        at = tuple(slice(start, start + size) for start, size in zip(*block.local, strict=True))
        yield Shard(name, plan.specs[name].shape, block.slice.offset, buffer[at])


def run(case: Case, group: Any) -> dict[str, Any]:
    rank = dist.get_rank()
    train = Mesh(tuple(range(case.layout.size)), case.layout)
    generation = generation_mesh(train, case.pg, case.tg)
    whole = {
        name: weight.detach() for name, weight in named_weights(tiny_model(case.kind, case.vocabulary, case.layers))
    }
    engine = engine_of(case, train, group, trains=True)
    model = engine_of(case, generation, group, trains=False) if case.bound else None
    targets = dict(named_weights(model.model)) if model is not None else None
    weights = MeasuredWeights(engine, generation, group, targets, overlap=case.overlap, bucket_bytes=1 << 15)
    weights.start()
    for name in weights.buffers:
        weights.ready(name)
    weights.wait()
    found: dict[str, Any] = {"there": equal_to(whole, weights.shards())}
    held = sum(buffer.numel() for buffer in weights.buffers.values())
    found["whole parts"] = held == sum(shard.tensor.numel() for shard in weights.shards())
    batch = ragged_batch(ROWS)
    if model is not None:
        expected = log_probs(TorchEngine(tiny_model(case.kind, case.vocabulary, case.layers), EngineOptions()), batch)
        found["log_probs"] = float((log_probs(model, batch) - expected).abs().max())
    moved = moved_bytes(weights.plan, rank)
    found["bytes"] = [weights.received, moved.received]
    found["redundant"], found["peak"] = weights.redundant, [weights.peak, moved.target]
    found["kept"] = moved.source if weights.redundant else 0
    if weights._released:
        try:
            [*engine.shards()]
            found["guarded"] = False
        except TrainingError:
            found["guarded"] = True
    back(weights, engine, group)
    found["back"] = equal_to(whole, engine.shards())
    found["freed"] = sum(buffer.untyped_storage().nbytes() for buffer in weights.buffers.values()) == 0
    engine.update([part(batch, entropy=True)])
    trained = {shard.name: shard.tensor.clone() for shard in gathered(engine.shards(), group)}
    found["trained"] = max(float((trained[name] - whole[name]).abs().max()) for name in whole) > 0
    weights.start()
    weights.wait()
    found["again"] = equal_to(trained, weights.shards())
    weights.release()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    every = [*range(dist.get_world_size())]
    all_ranks = dist.new_group(every)
    for one_case in CASES[sys.argv[1]]:
        line = {"case": str(one_case), "ranks": [run(one_case, all_ranks)]}
        found_by_all: list[Any] = [None for _ in every]
        dist.all_gather_object(found_by_all, line["ranks"][0])
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps({**line, "ranks": found_by_all}) + "\n")
    dist.destroy_process_group()
