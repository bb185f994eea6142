"""Peak memory of generation: what the KV cache was given, plus the workspace that the engine states?

    .venv/bin/python benchmarks/rollout_memory.py                          # SmolLM2-135M in bf16, a cache of 0.5 GiB
    .venv/bin/python benchmarks/rollout_memory.py --kv-cache-gb 1 --max-batch 128 --prompt-tokens 400

In this fresh process the model is loaded and its weights are touched; from there on the resident set's peak counts. The
work is more than the cache holds, so all of it is used. One line of JSON; fails if the peak is 10 % off either way.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

MODEL = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"


def resident(field: str) -> int:
    """`VmRSS` or `VmHWM` (its peak) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    from verl.kernels.malloc import use_one_arena
    from verl.models.packed import PackedModel
    from verl.rollout.base import Request, SamplingParams, generate
    from verl.rollout.embedded import EmbeddedEngine

    use_one_arena()
    torch.set_num_threads(args.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).eval()
    packed = PackedModel(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[:: 1024 // parameter.element_size()].sum()  # every page, no copy
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    engine = EmbeddedEngine(
        packed,
        eos_token_ids=(),
        seed=0,
        max_batch=args.max_batch,
        kv_memory=int(args.kv_cache_gb * 2**30),
        step_tokens=args.step_tokens,
    )
    rng = random.Random(0)
    params = SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True)
    # A prompt's blocks stay until their room is needed: the prompts alone fill the cache.
    for i in range(1 + int(1.2 * engine.cache.tokens / args.prompt_tokens)):
        prompt = [rng.randrange(100, packed.vocab_size) for _ in range(args.prompt_tokens)]
        for j in range(args.samples):
            engine.add(Request(f"{i}/{j}", prompt, params))
    for _ in generate(engine, []):
        pass
    peak, stated = resident("VmHWM") - before, engine.cache.bytes + engine.workspace
    return {
        "peak_over_weights_mb": round(peak / 1e6, 1),
        "stated_mb": round(stated / 1e6, 1),
        "kv_cache_mb": round(engine.cache.bytes / 1e6, 1),
        "workspace_mb": round(engine.workspace / 1e6, 1),
        "ratio": round(peak / stated, 3),
        "preemptions": engine.stats.preemptions,
        "weights_mb": round(sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6, 1),
        "dtype": args.dtype,
        "threads": args.threads,
        "holds": 0.9 <= peak / stated <= 1.1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--kv-cache-gb", type=float, default=0.5)
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    result = measure(parser.parse_args())
    print(json.dumps(result))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
