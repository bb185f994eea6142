"""A rank stops or dies in the middle of a phase; prints what the driver's error says, and after how many seconds.

python rank_stops.py MODEL SIGNAL PHASE FOLDER, PHASE one of start and those of `PHASES`; a job of two ranks that
something like torchrun started, or (without RANK) two ranks on Ray.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import verl
from verl._host.ranks import rank_here
from verl.cluster.controller import Controller
from verl.errors import VerlError
from verl.workers.trained import TrainedWorker

DEADLINE = 8.0
#: Where a phase is on a rank: module, class, method, and the call of it in which the rank stops.
PHASES: dict[str, tuple[str, str, str, int]] = {
    "start": ("verl.cluster.world", "World", "__init__", 1),
    "load": ("verl.training.torch_engine", "TorchEngine", "assemble", 1),
    "generate": ("verl.rollout.embedded.engine", "EmbeddedEngine", "step", 2),
    "transfer": ("verl.weights.transition", "Transfer", "_post", 2),
    "update": ("verl.training.engine", "TrainEngine", "_step", 2),
    "hand-over": ("verl.workers.actor", "ActorWorker", "_sync_weights", 1),
    "save": ("verl.workers.saving", "RankFiles", "gathered", 1),
}


def stop_in(module: str, owner: str, name: str, count: int, number: int) -> None:
    """Let a call of a method end this process, or stop it, if it is rank 1; import what the ranks of Ray lack."""
    for name_of in ("verl.workers.actor", "transformers.models.llama.modeling_llama"):
        import_module(name_of)
    if rank_here() != 1:
        return
    kind = getattr(import_module(module), owner)
    method: Callable[..., Any] = getattr(kind, name)
    calls = []

    def stops(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == count:
            os.kill(os.getpid(), number)
        return method(*args, **kwargs)

    setattr(kind, name, stops)


def stop_at_the_start(number: int) -> None:
    """Of ranks on Ray, that join when the driver tells them to."""
    from verl.cluster.ray import transport as on_ray

    send = on_ray.RayTransport.send
    on_ray.START_DEADLINE = DEADLINE  # of ranks that join

    def stops(job: Any, commands: Any, *args: Any) -> Any:
        if commands[0].method == "join":
            os.kill(job._about[1]["pid"], number)
        return send(job, commands, *args)

    on_ray.RayTransport.send = stops  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    torch.set_num_threads(1)
    model, which, phase, folder = sys.argv[1:]
    is_ray, which_signal = "RANK" not in os.environ, getattr(signal, which)
    if is_ray and phase == "start":
        stop_at_the_start(which_signal)
    elif not is_ray:
        stop_in(*PHASES[phase], which_signal)
    controller = Controller({"actor": "cpu:0-1"}, timeout=DEADLINE) if is_ray else Controller(timeout=DEADLINE)
    began = time.monotonic()
    try:
        options: dict[str, Any] = {"train": {"strategy": "fsdp"}, "optim": {"lr": 1e-2}, "placement": controller}
        actor = verl.Actor(model, sampling=verl.SamplingParams(max_new_tokens=4), dtype="float64", **options)
        if is_ray:
            controller.start()
            if phase != "start":
                job = controller.transport
                job.timeout = 120.0  # imports
                controller.everywhere(stop_in, *PHASES[phase], int(which_signal))
                job.timeout = DEADLINE
        while True:
            began = time.monotonic()
            samples = actor.generate_sequences(["Once upon a time", "And"], n=2)
            began = time.monotonic()
            actor.update(samples, [1.0, 0.0, 0.0, 1.0])
            began = time.monotonic()
            if phase == "save":
                Path(folder, "checkpoint").mkdir(exist_ok=True)
                actor.save(str(Path(folder, "checkpoint")))
                actor.group.call(TrainedWorker.saved)
    except VerlError as error:
        texts, cause = [], error
        while cause is not None:
            texts.append(f"{type(cause).__name__}: {cause}")
            cause = cause.__cause__  # type: ignore[assignment]
        sys.stdout.write(json.dumps({"error": texts, "seconds": time.monotonic() - began}) + "\n")
        sys.stdout.flush()
        sys.exit(1)
