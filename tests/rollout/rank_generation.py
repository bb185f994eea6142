"""Generation under tensor parallelism; a job of several ranks. The first one also generates by itself.

Prints one line of JSON a case: what both wrote.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from tests.training.cases import tiny_model
from verl.models.lora import add_lora
from verl.models.options import LoraOptions
from verl.models.packed import PackedModel
from verl.rollout.base import Request, RolloutEngine, SamplingParams, generate
from verl.rollout.embedded.engine import EmbeddedEngine
from verl.training.options import EngineOptions
from verl.training.torch_engine import TorchEngine
from verl.weights.layout import Layout, Mesh

KINDS = ("llama", "qwen2", "gpt2", "phi", "phi3", "window", "qwen3_moe", "mixtral")


class NoEven:
    """A logits processor: what it allows depends on what it has seen."""

    def __call__(self, tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        logits[(len(tokens) % 2) :: 2] = -torch.inf
        return logits


def requests() -> Iterator[Request]:
    """Greedy and sampled ones, some of a prompt in common, more than the cache holds at a time."""
    for row in range(10):
        prompt = [(5 * row // 3 + i * i) % 37 for i in range(40 if row % 3 else 3)]
        params = SamplingParams(max_new_tokens=40 + row, temperature=float(row % 4), min_p=0.01 * (row == 7))
        yield Request(f"r{row}", prompt, params, (NoEven(),) if row == 5 else ())


def answers(engine: RolloutEngine) -> list[dict[str, Any]]:
    found: dict[str, Any] = {}
    for sample in generate(engine, requests()):
        found[sample.id] = asdict(sample)
        if len(found) == 1:
            engine.abort(["r9"])
    return [found[name] for name in sorted(found)]


def make(packed: PackedModel, invariant: bool) -> EmbeddedEngine:
    block = 2 * 32 * packed.num_layers * packed.num_kv_heads * packed.head_dim * 8
    return EmbeddedEngine(packed, eos_token_ids=(2,), seed=1, kv_memory=12 * block, batch_invariant=invariant)


def model_of(kind: str) -> Any:
    name, _, adapters = kind.partition(" ")
    model = tiny_model(name)
    if adapters:
        add_lora(model, LoraOptions(r=2), seed=1)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.linspace(-0.1, 0.1, weight.numel(), dtype=weight.dtype).view_as(weight))
    return model


def run(kind: str, size: int, group: Any, invariant: bool = False) -> None:
    mesh = Mesh(tuple(range(size)), Layout(tp=size))
    packed = PackedModel(model_of(kind))
    TorchEngine(packed.model, EngineOptions(), mesh=mesh, group=group, packed=packed)
    packed.measure_heads()
    engine = make(packed, invariant)
    if not engine.runner.is_driver:
        for _ in range(2):
            engine.wake()
            engine.runner.worker_loop()
            engine.sleep()
        return
    found = []
    for _ in range(2):
        engine.wake()
        found.append(answers(engine))
        engine.sleep()
    alone = make(PackedModel(model_of(kind)), invariant)
    line = {
        "kind": kind + " invariant" * invariant,
        "heads": packed.num_heads,
        "bytes": engine.cache.nbytes / alone.cache.nbytes,
        "preemptions": engine.scheduler.preemptions,
        "together": found,
        "alone": answers(alone),
    }
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    everyone = dist.new_group(list(range(ranks)))
    for name in sys.argv[1:]:
        run(name, ranks, everyone)
    run(sys.argv[1], ranks, everyone, invariant=True)
    dist.destroy_process_group()
