"""A model cut over ranks, and its weights and state in another layout; a job of 4 ranks.

Prints a line of JSON a layout: how far each is from one process.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from tests.training.cases import OPTIM, ROWS, log_probs, make_engine, part, ragged_batch, tiny_model
from verl.batch import Batch
from verl.layout import Layout, Mesh
from verl.shard import Shard
from verl.training.options import EngineOptions
from verl.training.torch_engine import TorchEngine
from verl.workers.streams import gathered

#: Metrics that do not depend on how rows are put into micro-batches.
SUMS = ("loss", "grad_norm", "tokens")


def laid_out(layout: Layout, group: Any) -> TorchEngine:
    mesh = Mesh(tuple(range(4)), layout)
    return TorchEngine(tiny_model("gpt2"), EngineOptions(optim=OPTIM, micro_batch_size=2), mesh=mesh, group=group)


LAYOUTS = (
    (Layout(replicate=2, shard=2), Layout(shard=4)),
    (Layout(shard=2, sp=2), Layout(sp=4)),
    (Layout(replicate=2, sp=2), Layout(shard=2, sp=2)),
)


def distance(cut: TorchEngine, one: TorchEngine, batch: Batch) -> float:
    """Of log-probs, where ranks with other rows run unequal numbers of forwards."""
    index, _ = cut.mesh.rows(dist.get_rank()) or (0, 1)
    mine = batch.take([0, 1, 2]) if index % 2 else batch
    return float((log_probs(cut, mine) - log_probs(one, mine)).abs().max())


def compare(layout: Layout, then: Layout, group: Any) -> dict[str, Any]:
    batch = ragged_batch(ROWS)
    one, cut = make_engine(tiny_model("gpt2"), optim=OPTIM), laid_out(layout, group)
    metrics = [[engine.update([part(batch)]) for _ in range(2)] for engine in (one, cut)]
    expected = {shard.name: shard.tensor.clone() for shard in one.shards()}
    weights = [Shard.whole(shard.name, shard.tensor.clone()) for shard in gathered(cut.shards(), group)]
    again = laid_out(then, group)
    state, meta = cut.state()
    again.load_shards(weights)
    again.load_state(gathered(state, group), meta)
    resumed = [engine.update([part(batch)]) for engine in (cut, again)]
    one.update([part(batch)])
    return {
        "weights": max(float((shard.tensor - expected[shard.name]).abs().max()) for shard in weights),
        "names": sorted(expected) == sorted(shard.name for shard in weights) == sorted(cut.specs()),
        "metrics": max(abs(a[key] - b[key]) for a, b in zip(*metrics, strict=True) for key in SUMS),
        "log_probs": max(distance(engine, one, batch) for engine in (cut, again)),
        "resumed": max(abs(resumed[0][key] - resumed[1][key]) for key in SUMS),
        "cuts": sorted({spec.cuts for spec in cut.specs().values()}),
        "held": sum(shard.tensor.numel() for shard in cut.shards()) / sum(t.numel() for t in expected.values()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    every = dist.new_group([0, 1, 2, 3])
    for layouts in LAYOUTS:
        found = compare(*layouts, every)
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()
