"""Checkpoints on their way through layouts; a job of 4 ranks. Arguments: a directory, and layouts in their order.

The model trains one step at each layout; its checkpoint goes on at the next. Prints one line of JSON: the metrics of
each step, what the ranks wrote, and how much memory that took.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.tensor_memory import TensorMemory
from tests.training.cases import OPTIM, ROWS, part, ragged_batch, tiny_model
from verl.training.options import EngineOptions
from verl.training.torch_engine import TorchEngine
from verl.weights.layout import Layout, Mesh
from verl.weights.shard import Stream
from verl.weights.tensor_files import files_of, read_shards
from verl.workers.saving import RankFiles

LAYOUTS = {
    "one": Layout(),
    "ddp4": Layout(replicate=4),
    "fsdp2": Layout(shard=2),
    "fsdp4": Layout(shard=4),
    "hsdp4": Layout(replicate=2, shard=2),
    "pp2": Layout(pp=2),
    "fsdp2 x pp2": Layout(shard=2, pp=2),
    "tp2": Layout(tp=2),
    "fsdp2 x tp2": Layout(shard=2, tp=2),
}


MODELS = {
    "gpt2": ("gpt2", torch.float64),
    "llama in bf16": ("llama", torch.bfloat16),
}


def engine(kind: str, layout: Layout, group: Any) -> TorchEngine:
    mesh, moments = Mesh(tuple(range(layout.size)), layout), "float32" if kind.endswith("bf16") else None
    options = EngineOptions(optim=OPTIM.replace(moments=moments), micro_batch_size=2)
    return TorchEngine(tiny_model(*MODELS[kind]), options, mesh=mesh, group=group)


def load(at: TorchEngine, folder: Path) -> None:
    names = [path.name for path in folder.iterdir()]
    weights, state = ([folder / name for name in files_of(stem, names)] for stem in ("weights", "optimizer"))
    at.load_shards(read_shards(weights))
    at.load_state(read_shards(state), json.loads((folder / "meta.json").read_text()))


def save(at: TorchEngine, folder: Path, group: Any) -> list[int]:
    """How many bytes of tensors each rank wrote."""
    state, meta = at.state()
    files = RankFiles(folder, {"weights": Stream(at.shards), "optimizer": state}, group, background=False)
    found = files.gathered(wait=True)
    assert found is not None
    if dist.get_rank() == 0:
        (folder / "meta.json").write_text(json.dumps(meta))
    return [sum(entry["size"] for entry in rank["files"].values()) for rank in found]


def journey(kind: str, layouts: list[str], folder: Path, groups: dict[int, Any]) -> list[dict[str, Any]]:
    batch, found = ragged_batch(ROWS), []
    before: Path | None = None
    for number, name in enumerate(layouts):
        layout, here = LAYOUTS[name], folder / f"{kind}-{number}"
        if dist.get_rank() == 0:
            here.mkdir()
        dist.barrier()
        if dist.get_rank() < layout.size:
            at = engine(kind, layout, groups[layout.size])
            with TensorMemory() as loading:
                if before is not None:
                    load(at, before)
            metrics = at.update([part(batch)])
            with TensorMemory() as saving:
                sizes = save(at, here, groups[layout.size])
            # What stays of loading is the optimizer's state, where its memory was not there before.
            own = sum(shard.nbytes for shard in at.state()[0])
            assert loading.now <= own, (kind, name, loading.now, own)
            memory = torch.tensor([loading.peak - loading.now, saving.peak])
            if layout.size > 1:  # of the rank that needs most
                dist.all_reduce(memory, dist.ReduceOp.MAX, group=groups[layout.size])
            seen = {"loss": metrics["loss"], "norm": metrics["grad_norm"], "bytes": sizes, "memory": memory.tolist()}
            found.append({"layout": name, **seen})
        dist.barrier()
        before = here
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    by_size = {1: None, 2: pairs[dist.get_rank() // 2], 4: dist.new_group([0, 1, 2, 3])}
    for kind in MODELS:
        steps = journey(kind, sys.argv[2:], Path(sys.argv[1]), by_size)
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps({"kind": kind, "steps": steps}) + "\n")
    dist.destroy_process_group()
