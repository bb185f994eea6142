"""Training by FSDP and generation by vLLM on the same ranks; a job of several. Prints lines of JSON: each rank one for
every update of vLLM's weights, and the first what was generated.

python rank_vllm.py MODEL
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import verl
import verl.weights.shard
import verl.workers.generation
from tests.tensor_memory import TensorMemory
from verl.rollout.vllm.engine import VLLMEngine
from verl.weights.shard import Shard

PROMPTS = ["Once upon a time", "In the beginning", "A", "And"]
load_shards = VLLMEngine.load_shards


def counted(self: VLLMEngine, shards: Iterable[Shard], version: int) -> None:
    with TensorMemory() as memory:
        load_shards(self, shards, version)
    sys.stderr.write(json.dumps({"version": version, "peak": memory.peak}) + "\n")


def main(path: str) -> dict[str, Any]:
    sampling = verl.SamplingParams(max_new_tokens=10)
    actor = verl.Actor(path, rollout="vllm", max_num_seqs=8, kv_cache_gb=0.01, optim={"lr": 1e-2}, sampling=sampling)
    trainer = verl.Trainer(
        actor, reward_fn=lambda texts: [sum(map(ord, text)) % 7 / 7 for text in texts], n=4, log_dir=False,
        strategy="fsdp",
    )  # fmt: skip
    trainer.enable_3d_hybrid_engine()
    records = [trainer.step(PROMPTS) for _ in range(2)]
    rows = actor.generate_sequences(PROMPTS, temperature=0.0)
    trained = AutoModelForCausalLM.from_pretrained(path)
    weights = {shard.name: shard.tensor for shard in actor.shards()}
    trained.load_state_dict(weights, strict=False)
    expected = []
    for prompt, tokens in zip(rows["prompt_tokens"], rows["response_tokens"], strict=True):
        found = trained.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=len(tokens))
        expected.append(found[0, len(prompt) :].tolist())
    return {
        "mismatch": [record["sync/mismatch/max"] for record in records],
        "tokens": list(rows["response_tokens"]),
        "expected": expected,
        "all": sum(weight.nbytes for weight in weights.values()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    verl.weights.shard.BUNCH = 1 << 14
    verl.workers.generation.GenerationModel = None  # type: ignore[assignment, misc]
    VLLMEngine.load_shards = counted  # type: ignore[method-assign]
    sys.stdout.write(json.dumps(main(sys.argv[1])) + "\n")
