"""A forward that ranks compute together fails on WHO: "leader" or "all". Each rank prints what it raised, and after how
many seconds.

python rank_failures.py WHO; a job of several ranks
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.rollout.rank_generation import make, model_of, requests
from verl.models.packed import PackedModel
from verl.rollout.base import generate
from verl.training.options import EngineOptions
from verl.training.torch_engine import TorchEngine
from verl.weights.layout import Layout, Mesh

TIMEOUT = 60.0


def fail_at_third(*_: Any) -> None:
    calls.append(None)
    if len(calls) == 3:
        raise MemoryError("in the forward")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    size = dist.get_world_size()
    packed = PackedModel(model_of("gpt2"))
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=TIMEOUT))
    TorchEngine(
        packed.model, EngineOptions(), mesh=Mesh(tuple(range(size)), Layout(tp=size)), group=group, packed=packed
    )
    packed.measure_heads()
    engine = make(packed, invariant=False)
    calls: list[None] = []
    if engine.runner.is_driver or sys.argv[1] == "all":
        packed.model.transformer.h[1].register_forward_pre_hook(fail_at_third)
    began, raised = time.monotonic(), "nothing"
    engine.wake()
    try:
        try:
            list(generate(engine, requests())) if engine.runner.is_driver else engine.runner.worker_loop()
        finally:
            engine.sleep()
    except Exception as error:
        raised = type(error).__name__
    line = {"leads": engine.runner.is_driver, "raised": raised, "seconds": time.monotonic() - began}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
