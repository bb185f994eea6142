"""Time one GRPO step as it is written by hand: transformers' `generate` and DeepSpeed, without verl; a line of JSON.

    torchrun --nproc_per_node=2 benchmarks/plain_step.py --dtype bf16 --micro-batch 8 --steps 3

The work of `verl_grpo_step.py`, divided over the ranks by prompts: each rank generates all samples of its prompts as
one left-padded batch with a key-value cache, and takes one optimizer step by ZeRO 2. Rollout and update share the
weights, so old log-probs are those of the update itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
import workload
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed

# It would be compiled at the start, and serves inference alone.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def make_engine(args: argparse.Namespace, micro_batches: int) -> Any:
    """DeepSpeed's engine around the model."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation="sdpa")
    settings = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": micro_batches,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": args.dtype == "bf16"},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.LEARNING_RATE)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


@torch.no_grad()
def rollout(engine: Any, tokenizer: Any, texts: list[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences `[rows, tokens]`, the mask of their tokens, and advantages `[rows]`."""
    given = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to(engine.device)
    length = workload.NEW_TOKENS
    tokens = engine.module.generate(
        **given, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, min_new_tokens=length, max_new_tokens=length,
        num_return_sequences=workload.SAMPLES, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    mask = torch.cat(
        [given.attention_mask.repeat_interleave(workload.SAMPLES, 0), torch.ones_like(tokens[:, -length:])], 1
    )
    rewards = [workload.reward(text) for text in tokenizer.batch_decode(tokens[:, -length:], skip_special_tokens=True)]
    groups = torch.tensor(rewards, device=engine.device).view(-1, workload.SAMPLES)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    return tokens, mask, advantages.flatten()


def update(engine: Any, tokens: Tensor, mask: Tensor, advantages: Tensor, size: int) -> None:
    """One optimizer step over micro-batches of `size` rows."""
    length = workload.NEW_TOKENS
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for rows in torch.arange(len(tokens), device=tokens.device).split(size):
        given = {"input_ids": tokens[rows], "attention_mask": mask[rows], "position_ids": positions[rows]}
        logits = engine(**given, use_cache=False, logits_to_keep=length + 1).logits[:, :-1].float()
        log_probs = logits.log_softmax(-1).gather(-1, tokens[rows, -length:, None]).squeeze(-1)
        engine.backward(-((log_probs - log_probs.detach()).exp() * advantages[rows, None]).mean())
        engine.step()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the steps and return medians over the timed ones, and the peak memory of a rank."""
    torch.set_num_threads(args.threads)
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = workload.prompts(tokenizer)[rank::ranks]
    size = min(args.micro_batch, len(texts) * workload.SAMPLES)
    engine = make_engine(args, len(texts) * workload.SAMPLES // size)
    generation, training = [], []
    for _ in range(1 + args.steps):
        dist.barrier()
        start = time.perf_counter()
        engine.module.eval()
        sequences = rollout(engine, tokenizer, texts)
        dist.barrier()
        middle = time.perf_counter()
        engine.module.train()
        update(engine, *sequences, size)
        dist.barrier()
        generation.append(middle - start)
        training.append(time.perf_counter() - middle)
    peaks: list[Any] = [None] * ranks
    dist.all_gather_object(peaks, workload.peak_device_gb())
    return {
        "rollout_seconds": statistics.median(generation[1:]),
        "training_seconds": statistics.median(training[1:]),
        "step_seconds": statistics.median(a + b for a, b in zip(generation[1:], training[1:], strict=True)),
        "peak_gb": max(peaks),
    }


def main() -> None:
    """Measure, and print on rank 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one that warms up")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--model", default=str(workload.MODEL))
    result = measure(parser.parse_args())
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
