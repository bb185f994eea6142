"""Models read from files by the ranks that share them; a job of 2 ranks, over a directory of models.

Prints a line of JSON a case: how far weights and predictions are from one process, and the memory it took.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.tensor_memory import TensorMemory
from tests.training.cases import ROWS, ragged_batch
from verl.models.options import LoraOptions
from verl.models.source import ModelFiles
from verl.training.options import EngineOptions
from verl.training.torch_engine import TorchEngine
from verl.weights.layout import Layout, Mesh
from verl.workers.streams import gathered

LAYOUTS = {"fsdp2": Layout(shard=2), "tp2": Layout(tp=2), "pp2": Layout(pp=2), "ep2": Layout(ep=2), "sp2": Layout(sp=2)}
WANT = {"causal": ("lm", "log_probs"), "value": ("value", "values"), "score": ("score", "scores")}


def compare(files: ModelFiles, layout: Layout, group: Any) -> dict[str, Any]:
    head, want = WANT[files.kind]
    batch, whole = ragged_batch(ROWS), TorchEngine(files.load(), EngineOptions(), head=head)
    blank = files.on_meta()
    options = {"mesh": Mesh((0, 1), layout), "group": group, "device": "cpu"}
    with TensorMemory() as memory:
        cut = TorchEngine(blank, EngineOptions(), head=head, weights=files.by_parts(blank), **options)
    found = {shard.name: shard.tensor for shard in gathered(cut.shards(), group)}
    expected = {shard.name: shard.tensor for shard in whole.shards()}
    predicted = [engine.predict(batch, (want,))[want] for engine in (whole, cut)]
    return {
        "adapters": int(any(".lora_A." in name and tensor.any() for name, tensor in found.items())),
        "weights": sorted(found) == sorted(expected) and all(torch.equal(found[n], w) for n, w in expected.items()),
        "predicted": float((predicted[0] - predicted[1]).abs().max()),
        "own": sum(shard.nbytes for shard in cut.shards()),
        "all": sum(weight.nbytes for weight in expected.values()),
        "largest": max(weight.nbytes for weight in expected.values()),
        "peak": memory.peak,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    both = dist.new_group([0, 1])
    for name, kind, where, *lora in json.loads(sys.argv[2]):
        dtype = "float32" if name == "mixtral" else "float64"  # torch multiplies no groups of matrices in fp64
        adapters = LoraOptions(r=4) if lora else None
        files = ModelFiles(str(Path(sys.argv[1]) / name), kind, dtype, lora=adapters, seed=3)
        case = compare(files, LAYOUTS[where], both)
        case["tolerance"] = 1e-5 if dtype == "float32" else 1e-12
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps({"case": [name, kind, where, *lora], **case}) + "\n")
    dist.destroy_process_group()
