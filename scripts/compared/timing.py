"""The work that `scripts/compare.py --time` times: a process that waits for a line, works, and answers.

    python timing.py MODEL      # a line "rollout" or "step" in, the CPU seconds (user and system) that it took out

It has one thread, a fixed number of tokens and the same prompts each time. Which `verl` works is for PYTHONPATH to say,
and only names that `verl` itself exports are used.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

import torch

import verl

PROMPTS = ["What is 12 + 30?", "Count to ten.", "Name a colour.", "Write a line about the sea."]
SAMPLING = {"max_new_tokens": 16, "ignore_eos": True}


def length(texts: list[str]) -> list[float]:
    return [float(len(text)) for text in texts]


def works(model: str) -> dict[str, Callable[[], Any]]:
    """What is timed, by name. A learning rate of almost 0: what is generated stays the same."""
    actor = verl.Actor(model, sampling=SAMPLING, rollout="embedded", optim={"lr": 1e-12})
    trainer = verl.Trainer(actor, reward_fn=length, algorithm="grpo", n=4, kl_in="loss", kl_coef=0.001, log_dir=False)
    return {
        "rollout": lambda: actor.generate_sequences(PROMPTS, n=4, key="rollout"),
        "step": lambda: trainer.step(PROMPTS),
    }


def cpu_seconds() -> float:
    """Of this process and its children that have ended, user and system."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def main(model: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the trainer prints is no answer
    torch.set_num_threads(1)
    work = works(model)
    for name in (*work, *work):  # everything is made and measured once before it counts
        work[name]()
    gc.collect()
    gc.freeze()
    print("ready", file=answers)
    for line in sys.stdin:
        began = cpu_seconds()
        work[line.strip()]()
        print(cpu_seconds() - began, file=answers)


if __name__ == "__main__":
    main(sys.argv[1])
