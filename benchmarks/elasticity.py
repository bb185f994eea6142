"""Reward workers that come and go while training runs: a reward that sleeps, one sample at a time a worker, with 1
worker, then 4, then 1 again. Printed are trained samples a second in each window, the seconds from `scale` until all
workers have a sample, and whether every sample was scored and trained exactly once.

    python benchmarks/elasticity.py [--model] [--window 20] [--seconds 0.05] [--workers 4]

With `--model` the reward is a model whose forward sleeps, else a function.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from asynchronous import make_model
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

import verl
from verl.batch import Batch

PROMPTS, SAMPLES = 8, 16


def slow(seconds: float) -> str:
    """A user's file: the share of digits in a text."""
    return (
        "import time\n"
        "def reward(texts):\n"
        f"    time.sleep({seconds})\n"
        "    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts]\n"
    )


class SlowModel(LlamaForSequenceClassification):  # type: ignore[misc]
    """A reward model whose forward takes some seconds more."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self.config.sleep_seconds)
        return super().forward(*args, **kwargs)


def slow_model(seconds: float) -> SlowModel:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return SlowModel(LlamaConfig(vocab_size=96, num_labels=1, pad_token_id=0, sleep_seconds=seconds, **sizes))


class Recorder(verl.Trainer):
    """Keeps the ids of what was trained, and how many samples had no reward."""

    trained: list[str]
    unscored: int

    def learn(self, samples: Mapping[str, Batch]) -> dict[str, Any]:
        for batch in samples.values():
            self.trained += batch["id"]
            self.unscored += sum(reward is None for reward in batch["reward"])
        return super().learn(samples)


def step(trainer: Recorder) -> None:
    trainer.step([f"Count to {number}: " for number in range(PROMPTS)])


def window(trainer: Recorder, seconds: float) -> float:
    """Samples a second over at least so many seconds of training."""
    before, began = len(trainer.trained), time.perf_counter()
    while time.perf_counter() - began < seconds:
        step(trainer)
    return (len(trainer.trained) - before) / (time.perf_counter() - began)


def scale_in_mid_run(trainer: Recorder, reward: verl.Reward, workers: int) -> float:
    """Seconds until all of so many workers have a sample, while a step goes on."""
    took: list[float] = []

    def scale() -> None:
        while not any(worker.jobs for worker in reward.group.workers):
            time.sleep(0.01)
        began = time.perf_counter()
        reward.group.scale(workers)
        while sum(bool(worker.jobs) for worker in reward.group.workers) < workers:
            time.sleep(0.01)
        took.append(time.perf_counter() - began)

    scaler = threading.Thread(target=scale, daemon=True)
    scaler.start()
    while not took:
        step(trainer)
    return took[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window", type=float, default=20.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=0.05, help="that the reward of a sample takes")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--model", action="store_true", help="a reward model instead of a function")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder) / "model")
        file = Path(folder) / "slow.py"
        file.write_text(slow(options.seconds))
        actor = verl.Actor(
            path,
            optim={"lr": 1e-3},
            sampling=verl.SamplingParams(max_new_tokens=4, ignore_eos=True),
            max_num_seqs=PROMPTS * SAMPLES,
        )
        if options.model:
            tokenizer = AutoTokenizer.from_pretrained(path)
            reward = verl.Reward(model=slow_model(options.seconds), tokenizer=tokenizer, batch_size=1, workers=1)
        else:
            reward = verl.Reward(f"{file}:reward", workers=1)
        trainer = Recorder(actor, reward=reward, algorithm="grpo", n=SAMPLES, log_dir=False)
        trainer.trained, trainer.unscored = [], 0
        try:
            step(trainer)
            (first,) = reward.group.pids
            one = window(trainer, options.window)
            took = scale_in_mid_run(trainer, reward, options.workers)
            many = window(trainer, options.window)
            kept = first in reward.group.pids
            scale_in_mid_run(trainer, reward, 1)
            again = window(trainer, options.window)
        finally:
            trainer.close()
    expected = trainer.steps * PROMPTS * SAMPLES
    print(json.dumps({
        "reward": "model" if options.model else "function",
        "samples_per_second": {"1": round(one, 2), str(options.workers): round(many, 2), "1 again": round(again, 2)},
        "speedup": round(many / one, 3),
        "seconds_until_all_serve": round(took, 2),
        "first_worker_kept": kept,
        "samples": expected,
        "lost_or_twice": expected - len(set(trainer.trained)) + len(trainer.trained) - len(set(trainer.trained)),
        "unscored": trainer.unscored,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
