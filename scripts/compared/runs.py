"""The small runs of `scripts/compare.py`: five steps under a seed, in fp64 throughout.

    python runs.py FOLDER RUN [RUN ...]     # a run on four ranks: under torchrun, alone

In FOLDER each run leaves RUN.json, the metrics of its steps, and RUN.safetensors, its final weights. Which `verl` runs
is for PYTHONPATH to say. Only names that `verl` itself exports are used, so that older and newer code can run this.

Nothing here depends on the processor by more than the rounding of fp64. Weights are sums of whole numbers, made by
Python. A sample's uniform numbers are hashes. A token is the first whose cumulative probability passes its uniform
number: rounding of 1e-15 changes one of 10^3 tokens in a run with a probability of about 1e-12.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

import verl

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "tests"))
from exact import norm_in_fp64, rotate_in_fp64

STEPS = 5
LETTERS = "abcdefghijklmnopqrstuvwxyz ,.?!"
IDS = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**IDS, **SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**IDS, **SIZES, num_key_value_heads=2, head_dim=8),
    "mixtral": lambda: MixtralConfig(**IDS, **SIZES, num_key_value_heads=2, num_local_experts=4),
    # All of it is in the model's own dtype, so that workers in other processes can make it.
    "gpt2": lambda: GPT2Config(**IDS, n_embd=32, n_layer=2, n_head=4, n_positions=128),
}
PROMPTS = ["once upon a time", "in the beginning", "why?", "a b c d", "the quick brown fox", "and then", "so", "well,"]
SAMPLING = {"max_new_tokens": 12}
OPTIM = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.01}
COMMON: dict[str, Any] = {
    "optim": OPTIM,
    "sampling": SAMPLING,
    "rollout": "embedded",
    "max_tokens_per_micro_batch": 160,
    "seed": 3,
}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter."""
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(["<end>", *LETTERS])}, unk_token=" "))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")


def model(kind: str) -> PreTrainedModel:
    """A tiny model in fp64 throughout, its weights the same on every machine."""
    made = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float64)
    numbers = random.Random(7)
    with torch.no_grad():
        for weight in made.parameters():
            values = [numbers.randrange(-1000, 1001) for _ in range(weight.numel())]
            offset = float(weight.dim() == 1 and weight[0] == 1)  # of a norm
            weight.copy_(offset + torch.tensor(values, dtype=torch.float64).view(weight.shape) / 4096)
    norm_in_fp64(made)
    rotate_in_fp64(made)
    if kind == "mixtral":
        made.set_experts_implementation("eager")  # grouped products have no fp64
    return made.eval()


def directory(kind: str, path: Path) -> str:
    """The same as files."""
    model(kind).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def early(texts: list[str]) -> list[float]:
    """The share of letters before n."""
    return [sum(letter < "n" for letter in text) / max(len(text), 1) for text in texts]


def short(texts: list[str]) -> list[float]:
    return [1 - len(text) / 16 for text in texts]


def early_and_short(texts: list[str]) -> list[float]:
    return [a + b for a, b in zip(early(texts), short(texts), strict=True)]


def batches() -> Iterator[list[str]]:
    """Four prompts a step."""
    for step in range(STEPS):
        yield [PROMPTS[(3 * step + i) % len(PROMPTS)] for i in range(4)]


def grpo(folder: Path) -> Iterator[Any]:
    actor = verl.Actor(model("llama"), tokenizer(), mini_batch_size=8, **COMMON)
    trainer = verl.Trainer(actor, reward_fn=early, algorithm="grpo", n=4, kl_in="loss", kl_coef=0.05, log_dir=False)
    yield trainer
    for prompts in batches():
        trainer.step(prompts)


def ppo(folder: Path) -> Iterator[Any]:
    actor = verl.Actor(model("qwen3"), tokenizer(), mini_batch_size=8, epochs=2, **COMMON)
    trainer = verl.PPOTrainer(actor, reward_fn=early, n=4, kl_in="reward", kl_coef=0.05, log_dir=False)
    yield trainer
    for prompts in batches():
        trainer.step(prompts)


def dpo(folder: Path) -> Iterator[Any]:
    actor = verl.Actor(model("mixtral"), tokenizer(), **COMMON)
    rows = [
        {"prompt": prompt, "chosen": " ".join(PROMPTS[i:][:2]), "rejected": PROMPTS[i - 1]}
        for i, prompt in enumerate(PROMPTS)
    ]
    loader = verl.OfflineDatasetLoader(rows, actor.tokenizer, batch_size=4)
    trainer = verl.Trainer(actor, algorithm="dpo", log_dir=False)
    yield trainer
    trainer.fit(loader, STEPS)


def tasks(folder: Path) -> Iterator[Any]:
    actor = verl.Actor(model("mixtral"), tokenizer(), **COMMON)
    trainer = verl.Trainer(
        actor,
        tasks=[
            verl.Task("early", "grpo", {"reward": early}, n=4),
            verl.Task("short", "ppo", {"reward": early}, n=2, sampling={"max_new_tokens": 8, "temperature": 0.8}),
            verl.Task("both", "rloo", {"reward": early_and_short}, n=2),
        ],
        log_dir=False,
    )
    yield trainer
    for prompts in batches():
        trainer.step({"early": prompts[:2], "short": prompts[1:3], "both": prompts[3:]})


def fsdp_tp(folder: Path) -> Iterator[Any]:
    """FSDP over 2 x tensor parallelism over 2 ranks."""
    path = directory("gpt2", folder / f"gpt2-{os.environ['RANK']}")
    actor = verl.Actor(
        path, dtype="float64", strategy="fsdp", train={"tensor_parallel_size": 2}, mini_batch_size=8, **COMMON
    )
    trainer = verl.Trainer(actor, reward_fn=early, algorithm="grpo", n=4, kl_in="loss", kl_coef=0.05, log_dir=False)
    yield trainer
    for prompts in batches():
        trainer.step(prompts)


def asynchronous(folder: Path) -> Iterator[Any]:
    """Which rows a worker computes together is for time to decide: with `batch_invariant` no bit depends on it."""
    actor = verl.Actor(directory("gpt2", folder / "gpt2"), dtype="float64", batch_invariant=True, **COMMON)
    trainer = verl.AsyncTrainer(
        actor, reward_fn=early, algorithm="grpo", n=4, batch_size=4, max_staleness=0, log_dir=False, deadline=200
    )
    yield trainer
    prompts = batches()
    for _ in range(STEPS):
        trainer.advance(prompts)
    trainer.close()


#: Run by name -> what makes its trainer, and then goes through its steps.
RUNS: dict[str, Callable[[Path], Iterator[Any]]] = {
    "grpo": grpo,
    "ppo": ppo,
    "dpo": dpo,
    "tasks": tasks,
    "fsdp_tp": fsdp_tp,
    "async": asynchronous,
}


def main(folder: Path, names: Iterable[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        records: list[dict[str, Any]] = []
        steps = RUNS[name](folder)
        trainer = next(steps)
        trainer.on_log_hook(lambda _, record, records=records: records.append(dict(record)))
        for _ in steps:
            pass
        weights = {
            f"{role}/{shard.name}": shard.tensor.detach().clone()
            for role, handle in trainer.roles.items()
            for shard in handle.shards()
        }
        save_file(weights, folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps(records))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
