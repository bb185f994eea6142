"""Time generation: ours and transformers' `generate`, on the same prompts. One line of JSON an engine.

    .venv/bin/python benchmarks/rollout.py                              # 32 prompts x 8 samples x 128 tokens
    .venv/bin/python benchmarks/rollout.py --prompts 4 --prompt-tokens 83 --new-tokens 64 --engines embedded

Every response has its full length, at temperature 1 over the whole vocabulary, in the model's dtype. The engines run
one after the other, each in a process of its own: `peak_memory_gb` is that process's. `cpu_seconds` far below
`threads * seconds` means that other programs had the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

MODEL = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"
ENGINES = ("embedded", "hf", "generate")


def prompts(args: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """Random tokens; lengths within a tenth of `--prompt-tokens`."""
    rng = random.Random(0)
    spread = args.prompt_tokens // 10
    lengths = [args.prompt_tokens + rng.randint(-spread, spread) for _ in range(args.prompts)]
    return [[rng.randrange(100, vocabulary) for _ in range(length)] for length in lengths]


def engine_run(args: argparse.Namespace, model: Any) -> tuple[Callable[[], int], Callable[[], dict[str, float]]]:
    """One rollout by an engine of ours, and where its time went."""
    from verl.models.packed import PackedModel
    from verl.rollout.base import Request, SamplingParams, generate
    from verl.rollout.embedded import EmbeddedEngine, EngineStats
    from verl.rollout.hf import HFEngine

    params = SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True)
    texts = prompts(args, model.config.vocab_size)
    requests = [Request(f"{i}/{j}", text, params) for i, text in enumerate(texts) for j in range(args.samples)]
    if args.engine == "hf":
        hf = HFEngine(model, eos_token_ids=(), seed=0, max_batch=args.batch)
        return lambda: sum(len(sample.tokens) for sample in generate(hf, requests)), dict
    memory = int(args.kv_cache_gb * 2**30)
    engine = EmbeddedEngine(PackedModel(model), eos_token_ids=(), seed=0, max_batch=args.batch, kv_memory=memory)

    def run() -> int:
        engine.load_shards((), engine.policy_version + 1)  # as after an update: no prompt is known
        engine.stats = EngineStats()
        return sum(len(sample.tokens) for sample in generate(engine, requests))

    def split() -> dict[str, float]:
        stats = engine.stats
        return {
            "forward_seconds": round(stats.forward_seconds, 3),
            "head_and_sampling_seconds": round(stats.sampling_seconds, 3),
            "steps": stats.steps,
            "preemptions": stats.preemptions,
        }

    return run, split


def generate_run(args: argparse.Namespace, model: Any) -> tuple[Callable[[], int], Callable[[], dict[str, float]]]:
    """One rollout by `model.generate` over left-padded batches."""
    import torch

    texts = [text for text in prompts(args, model.config.vocab_size) for _ in range(args.samples)]

    def run() -> int:
        count = 0
        for start in range(0, len(texts), args.batch):
            batch = texts[start : start + args.batch]
            longest = max(map(len, batch))
            ids = torch.tensor([[0] * (longest - len(text)) + text for text in batch])
            mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in batch])
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=args.new_tokens,
                max_new_tokens=args.new_tokens,
                pad_token_id=0,
            )
            count += out[:, longest:].numel()
        return count

    return run, dict


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Load the model, warm up on one prompt, then time the rollouts: medians."""
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).eval()
    weights = _peak_gb()
    make = generate_run if args.engine == "generate" else engine_run
    warm_up = argparse.Namespace(**{**vars(args), "prompts": 1, "new_tokens": 4})
    make(warm_up, model)[0]()
    run, split = make(args, model)
    seconds, cpu = [], []
    for _ in range(args.repeats):
        start, start_cpu = time.perf_counter(), time.process_time()
        tokens = run()
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    expected = args.prompts * args.samples * args.new_tokens
    if tokens != expected:
        raise SystemExit(f"{args.engine} gave {tokens} tokens instead of {expected}: this is not the agreed work")
    median = statistics.median(seconds)
    return {
        "engine": args.engine,
        "tokens_per_second": round(tokens / median, 1),
        "seconds": round(median, 3),
        "cpu_seconds": round(statistics.median(cpu), 3),
        **split(),
        "peak_memory_gb": round(_peak_gb(), 3),
        "memory_before_gb": round(weights, 3),
        "threads": args.threads,
        "dtype": args.dtype,
        "workload": f"{args.prompts} x ~{args.prompt_tokens} x {args.samples} x {args.new_tokens}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _peak_gb() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def main() -> None:
    """Measure one engine here, or each of several in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["embedded", "generate"])
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=94)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=256, help="responses at a time")
    parser.add_argument("--kv-cache-gb", type=float, default=2.0, help="of the embedded engine")
    parser.add_argument("--repeats", type=int, default=1, help="timed rollouts; their median is reported")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.engine:
        print(json.dumps(measure(args)))
        return
    for engine in args.engines:
        subprocess.run([sys.executable, *sys.argv, "--engine", engine], check=True)


if __name__ == "__main__":
    main()
