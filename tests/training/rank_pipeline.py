"""What the stages of a pipeline keep, agree on and wait for; a job of 4 ranks. Prints one line of JSON."""

from __future__ import annotations

import json
import sys
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.training.cases import OPTIM, ROWS, part, ragged_batch, tiny_model, update
from verl.algorithms.loss_terms import Loss, LossInput
from verl.errors import TrainingError
from verl.training.options import EngineOptions
from verl.training.ranks import gather_json
from verl.training.torch_engine import TorchEngine
from verl.weights.layout import Layout, Mesh

#: Each row is a micro-batch.
OPTIONS = EngineOptions(optim=OPTIM, micro_batch_size=1)


def staged(layout: Layout, group: Any, dtype: torch.dtype = torch.float64) -> TorchEngine:
    mesh = Mesh(tuple(range(4)), layout)
    return TorchEngine(tiny_model("gpt2", dtype, layers=4), OPTIONS, mesh=mesh, group=group)


def most_alive(engine: TorchEngine) -> int:
    """Micro-batches whose activations this rank keeps at one time, in an update of 7."""
    alive, begun, most = Counter[int](), 0, 0

    def begins(*_: Any) -> None:
        nonlocal begun
        begun += 1

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal most
            self.tensor, self.of = tensor, begun
            alive[begun] += 1
            most = max(most, len(+alive))

        def __del__(self) -> None:
            alive[self.of] -= 1

    hook = engine.forward.register_forward_pre_hook(begins)
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        update(engine, ragged_batch(ROWS))
    hook.remove()
    return most


def detached(x: LossInput) -> Loss:
    assert x.log_probs is not None
    return Loss(total=x.log_probs.detach().sum())


def overflowing(x: LossInput) -> Loss:
    assert x.log_probs is not None
    return Loss(total=1e8 * x.log_probs.sum())


def refusal(engine: TorchEngine) -> str:
    try:
        update(engine, ragged_batch(ROWS), detached)
    except TrainingError as error:
        return str(error)
    return ""


def skipped(engine: TorchEngine) -> tuple[float, float]:
    """Whether a step whose fp16 gradients overflow is skipped here, and the loss scale after it."""
    before = [shard.tensor.clone() for shard in engine.shards()]
    found = update(engine, ragged_batch(ROWS), overflowing)
    assert all(torch.equal(a, shard.tensor) for a, shard in zip(before, engine.shards(), strict=True))
    return found["update/skipped"], engine.optimizer.gradients.loss_scale


def one_row(group: Any) -> float:
    """How far a batch of one row, which only some of the ranks have, is from one process."""
    batch = ragged_batch(ROWS[:1])
    found = update(staged(Layout(replicate=2, pp=2), group), batch)
    one = TorchEngine(tiny_model("gpt2", layers=4), OPTIONS).update([part(batch)])
    return max(abs(found[name] - one[name]) for name in ("loss", "grad_norm"))


def without_a_stage(group: Any) -> str:
    """What the other ranks raise when the last one does not come to an update."""
    engine = staged(Layout(pp=4), group)
    if dist.get_rank() == 3:
        return ""
    try:
        update(engine, ragged_batch(ROWS))
    except RuntimeError as error:
        return str(error)
    return "it ended"


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    every = dist.new_group([0, 1, 2, 3])
    stages = staged(Layout(pp=4), every)
    line = {
        "alive": gather_json(most_alive(stages), every),
        "refused": gather_json(refusal(stages), every),
        "skipped": gather_json(skipped(staged(Layout(pp=4), every, torch.float16)), every),
        "one_row": gather_json(one_row(every), every),
    }
    short = dist.new_group([0, 1, 2, 3], timeout=timedelta(seconds=4))
    line["late"] = gather_json(without_a_stage(short), every)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(line) + "\n")
    dist.destroy_process_group()
