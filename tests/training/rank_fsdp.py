"""The options of FSDP, one by one, against one process; a job of 2 ranks. Prints one line of JSON for each."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from tests.training.cases import OPTIM, ROWS, make_engine, part, ragged_batch, tiny_model
from verl.errors import ConfigError
from verl.training.options import EngineOptions
from verl.training.torch_engine import TorchEngine
from verl.weights.layout import Layout, Mesh
from verl.workers.streams import gathered


def sgd(weights: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=1e-2, momentum=0.9)


def is_mlp(module: torch.nn.Module) -> bool:
    return isinstance(module, LlamaMLP)


LAYERS = partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
LARGE = partial(size_based_auto_wrap_policy, min_num_params=3000)
MIXED = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
#: Options of the engine, and the classes of the units that they make.
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "default": ({}, ["LlamaDecoderLayer"]),
    "kept after forward": ({"reshard_after_forward": False}, ["LlamaDecoderLayer"]),
    "prefetched": ({"forward_prefetch": True}, ["LlamaDecoderLayer"]),
    "offloaded weights": ({"param_offload": True}, ["LlamaDecoderLayer"]),
    "offloaded optimizer": ({"optimizer_offload": True}, ["LlamaDecoderLayer"]),
    "by name": ({"wrap_policy": {"transformer_layer_cls_to_wrap": "LlamaMLP"}}, ["LlamaMLP"]),
    "by name, flat": ({"transformer_layer_cls_to_wrap": ["LlamaMLP"]}, ["LlamaMLP"]),
    "by names": (
        {"wrap_policy": {"transformer_layer_cls_to_wrap": ["LlamaMLP", "LlamaDecoderLayer"]}},
        ["LlamaDecoderLayer", "LlamaMLP"],
    ),
    "by function": ({"wrap_policy_fn": is_mlp}, ["LlamaMLP"]),
    "by FSDP1's policy": ({"wrap_policy_fn": LAYERS}, ["LlamaDecoderLayer"]),
    "by size": ({"wrap_policy_fn": LARGE}, ["LlamaAttention", "LlamaMLP"]),
}


def held(engine: TorchEngine) -> int:
    """Bytes of the optimizer's and the gradients' tensors on this rank, beside the weights."""
    assert engine.optimizer is not None
    gradients = [weight.gradient for weight in engine.optimizer.gradients.weights if weight.gradient is not None]
    return sum(tensor.nbytes for tensor in gradients)


def found(model: Any, group: Any, options: dict[str, Any], **more: Any) -> tuple[dict[str, Any], TorchEngine]:
    given = {"optim": OPTIM, "strategy": "fsdp", "fsdp_config": options, **more}
    engine = TorchEngine(model, EngineOptions(**given), mesh=Mesh((0, 1), Layout(shard=2)), group=group)
    batch = ragged_batch(ROWS)
    metrics = [engine.update([part(batch)]) for _ in range(2)]
    weights = {shard.name: shard.tensor for shard in gathered(engine.shards(), group)}
    return {"metrics": metrics, "weights": weights}, engine


def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    numbers = (abs(x[k] - y[k]) for x, y in zip(a["metrics"], b["metrics"], strict=True) for k in ("loss", "grad_norm"))
    return max(*numbers, *(float((a["weights"][n] - w).abs().max()) for n, w in b["weights"].items()))


def alone(**options: Any) -> dict[str, Any]:
    engine, batch = make_engine(tiny_model(), **options), ragged_batch(ROWS)
    metrics = [engine.update([part(batch)]) for _ in range(2)]
    return {"metrics": metrics, "weights": {shard.name: shard.tensor for shard in engine.shards()}}


def lines(group: Any) -> Iterator[dict[str, Any]]:
    one = alone(optim=OPTIM)
    for case, (options, _) in CASES.items():
        cut, engine = found(tiny_model(), group, options)
        units = {type(m).__name__.removeprefix("FSDP") for m in engine.model.modules() if isinstance(m, FSDPModule)}
        units.discard("Module")
        yield {"case": case, "apart": apart(one, cut), "units": sorted(units), "held": held(engine)}
    own, _ = found(tiny_model(), group, {}, optim=None, optimizer=sgd)
    yield {"case": "own optimizer", "apart": apart(alone(optimizer=sgd), own)}
    model = tiny_model(dtype=torch.float32)
    gathered_as: list[torch.dtype] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda m, _: gathered_as.append(m.up_proj.weight.dtype))
    mixed, engine = found(model, group, {"mixed_precision": MIXED})
    yield {
        "case": "mixed precision",
        "loss": abs(mixed["metrics"][0]["loss"] / one["metrics"][0]["loss"] - 1),
        "gathered": str(gathered_as[-1]),
        "held": sorted({str(spec.dtype) for spec in engine.weights.specs.values()}),
    }
    try:
        found(tiny_model(), group, {"wrap_policy": {"transformer_layer_cls_to_wrap": "LlamaDecoderLayr"}})
    except ConfigError as error:
        yield {"case": "misspelt", "error": str(error)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for line in lines(dist.new_group([0, 1])):
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps(line) + "\n")
    dist.destroy_process_group()
