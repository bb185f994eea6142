"""Asynchronous against synchronous training, on separate devices, where a rollout takes `--ratio` times an update.

The rollout waits (as for a server): its engine sleeps so that a batch of a step takes that long, one batch at a time,
and the updates are real. With one rollout worker the best that can be is (ratio + 1) / max(ratio, 1): 1.5 for 2.

    python benchmarks/asynchronous.py [--steps 20] [--ratio 2] [--seconds 1.0]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import verl
from verl.rollout.embedded.engine import EmbeddedEngine

TOKENS, PROMPTS, SAMPLES = 16, 4, 4


class WaitingEngine(EmbeddedEngine):
    """A step of it takes WAITING_SECONDS."""

    def __init__(self, packed: Any, tokenizer: Any, eos: Any, options: Any) -> None:
        size = options.max_num_seqs
        super().__init__(packed, eos_token_ids=eos, seed=options.seed, tokenizer=tokenizer, max_batch=size)

    def step(self) -> Any:
        began = time.perf_counter()
        samples = super().step()
        time.sleep(max(0.0, float(os.environ["WAITING_SECONDS"]) - (time.perf_counter() - began)))
        return samples


def make_model(path: Path) -> str:
    """A small random Llama with a tokenizer of single characters."""
    characters = [chr(code) for code in range(32, 127)]
    core = Tokenizer(models.WordLevel({"<end>": 0} | {c: i + 1 for i, c in enumerate(characters)}, unk_token="<end>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>").save_pretrained(path)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=96, eos_token_id=0, bos_token_id=0, **sizes)).save_pretrained(path)
    return str(path)


def prompts() -> Iterator[list[str]]:
    while True:
        yield [f"Count to {number}: " for number in range(PROMPTS)]


def reward(texts: list[str]) -> list[float]:
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts]


def trainer(path: str, update_seconds: float, asynchronous: bool) -> verl.Trainer:
    actor = verl.Actor(
        path,
        rollout=f"{Path(__file__).resolve()}:WaitingEngine",
        optim={"lr": 1e-3},
        sampling=verl.SamplingParams(max_new_tokens=TOKENS, ignore_eos=True),
        max_num_seqs=PROMPTS * SAMPLES,
    )
    options: dict[str, Any] = {"reward_fn": reward, "algorithm": "grpo", "n": SAMPLES, "log_dir": False}
    made = verl.AsyncTrainer(actor, batch_size=PROMPTS, **options) if asynchronous else verl.Trainer(actor, **options)
    learn = made.learn

    def padded(samples: Any) -> Any:
        """The update, and the rest of the time that an update is to take here."""
        began = time.perf_counter()
        metrics = learn(samples)
        time.sleep(max(0.0, update_seconds - (time.perf_counter() - began)))
        return metrics

    made.learn = padded  # type: ignore[method-assign]
    return made


def measure(path: str, steps: int, update_seconds: float, asynchronous: bool) -> float:
    """Seconds a step, after two steps that warm up."""
    made = trainer(path, update_seconds, asynchronous)
    source = prompts()
    try:
        made.fit(source, 2)
        began = time.perf_counter()
        made.fit(source, steps)
        return (time.perf_counter() - began) / steps
    finally:
        made.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ratio", type=float, default=2.0, help="seconds of a rollout / seconds of an update")
    parser.add_argument("--seconds", type=float, default=1.0, help="of an update")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # A rollout takes as many steps as it has tokens.
    os.environ["WAITING_SECONDS"] = str(options.ratio * options.seconds / TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder))
        synchronous = measure(path, options.steps, options.seconds, asynchronous=False)
        asynchronous = measure(path, options.steps, options.seconds, asynchronous=True)
    print(json.dumps({
        "synchronous_seconds_per_step": round(synchronous, 3),
        "asynchronous_seconds_per_step": round(asynchronous, 3),
        "speedup": round(synchronous / asynchronous, 3),
        "bound": round((options.ratio + 1) / max(options.ratio, 1.0), 3),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
