"""What the tests of the trainer share: prompts, a reward that can be learned in a few steps, and a trainer of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import verl
from verl.dataflow.loop import run_sync
from verl.trainer.task import Samples

PROMPTS = ["Once upon a time", "In the beginning"]
SHORT = verl.SamplingParams(max_new_tokens=6, ignore_eos=True)


def low_bytes(texts: list[str]) -> list[float]:
    return [sum(ord(c) < 100 for c in text) / max(len(text), 1) for text in texts]


def make(path: Path, algorithm: str, lr: float = 1e-2, **options: Any) -> verl.Trainer:
    actor = verl.Actor(str(path), optim={"lr": lr}, sampling=SHORT)
    return verl.Trainer(actor, reward_fn=low_bytes, algorithm=algorithm, log_dir=False, **options)


def collected(trainer: verl.Trainer, prompts: Any, key: str = "s0", task: str | None = None) -> Samples:
    """The scored samples of a step, without the update; `task` where there are several."""
    active = trainer.task if task is None else trainer.tasks[task]
    return run_sync(active.collect(active.rows(prompts, key), key))
