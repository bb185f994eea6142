"""A rank stops or dies in the middle of a call; prints what the driver's error says, and after how many seconds.

python rank_stops.py MODEL SIGNAL PHASE, PHASE one of transfer, generate, update
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import verl
from verl.controller.controller import Controller
from verl.controller.ranks import rank_here
from verl.errors import VerlError
from verl.hybrid.transfer import Transfer
from verl.rollout.embedded import EmbeddedEngine
from verl.training.torch_engine import TorchEngine

PHASES: dict[str, tuple[Any, str]] = {
    "transfer": (Transfer, "_post"),
    "generate": (EmbeddedEngine, "step"),
    "update": (TorchEngine, "_step"),
}


def stop_in(owner: Any, name: str, number: int) -> None:
    """Let the second call of a method end this process, or stop it."""
    method: Callable[..., Any] = getattr(owner, name)
    calls = []

    def stops(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), number)
        return method(*args, **kwargs)

    setattr(owner, name, stops)


if __name__ == "__main__":
    torch.set_num_threads(1)
    model, which, phase = sys.argv[1:]
    if rank_here() == 1:
        stop_in(*PHASES[phase], getattr(signal, which))
    controller = Controller(timeout=8)
    options: dict[str, Any] = {"train": {"strategy": "fsdp"}, "optim": {"lr": 1e-2}, "placement": controller}
    actor = verl.Actor(model, sampling=verl.SamplingParams(max_new_tokens=4), dtype="float64", **options)
    began = time.monotonic()
    try:
        while True:
            began = time.monotonic()
            samples = actor.generate_sequences(["Once upon a time", "And"], n=2)
            began = time.monotonic()
            actor.update(samples, [1.0, 0.0, 0.0, 1.0])
    except VerlError as error:
        texts, cause = [], error
        while cause is not None:
            texts.append(f"{type(cause).__name__}: {cause}")
            cause = cause.__cause__  # type: ignore[assignment]
        sys.stdout.write(json.dumps({"error": texts, "seconds": time.monotonic() - began}) + "\n")
        sys.stdout.flush()
        sys.exit(1)
