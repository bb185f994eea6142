"""Peak memory of generation: what the KV cache was given, plus the workspace that a step needs?

    .venv/bin/python benchmarks/rollout_memory.py                          # SmolLM2-135M in bf16, a cache of 0.5 GiB
    .venv/bin/python benchmarks/rollout_memory.py --kv-cache-gb 1 --max-batch 128 --prompt-tokens 400
    .venv/bin/python benchmarks/rollout_memory.py --shared --samples 16    # what samples of one prompt share

In this fresh process the model is loaded and its weights are touched; from there on the resident set's peak counts. The
work is more than the cache holds, so all of it is used. One line of JSON; fails if the peak is 10 % off either way.

With `--shared`: the KV cache that `--samples` responses to one prompt need at their longest, beside as many responses
to prompts of their own; in blocks, and in memory that became real. Fails if the full blocks of the prompt are there
more than once.
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

#: Bytes that oneDNN keeps in all, measured on a rollout with preemptions.
KEPT_FOR_PRODUCTS = 48 << 20
MODEL = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"


def resident(field: str) -> int:
    """`VmRSS` or `VmHWM` (its peak) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def workspace(engine: Any) -> int:
    """Bytes that generation needs beside weights and KV cache: activations of a step, its logits, and on CPU what
    oneDNN keeps for products in half precision. Processors and top-p need some more rows of logits per response."""
    packed = engine.packed
    padded, options = engine.runner.padded, engine.options
    tokens, rows = padded(options.step_tokens + options.max_batch), padded(options.max_batch)
    width = getattr(packed.config, "intermediate_size", None) or 4 * packed.hidden_size
    heads = (packed.num_heads + packed.num_kv_heads) * packed.head_dim
    layer = 4 * packed.hidden_size + 2 * heads + 2 * width
    kept = KEPT_FOR_PRODUCTS if packed.device.type == "cpu" and packed.dtype.itemsize == 2 else 0
    return int((tokens * layer + rows * packed.vocab_size) * packed.dtype.itemsize + kept)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    from verl._host.device import limit_library_memory
    from verl.models.packed import PackedModel
    from verl.rollout.base import Request, SamplingParams, generate
    from verl.rollout.embedded.engine import EmbeddedEngine

    limit_library_memory()
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
    for i in range(1 + int(1.2 * engine.cache.num_blocks * engine.cache.block / args.prompt_tokens)):
        prompt = [rng.randrange(100, packed.vocab_size) for _ in range(args.prompt_tokens)]
        for j in range(args.samples):
            engine.add(Request(f"{i}/{j}", prompt, params))
    for _ in generate(engine, []):
        pass
    peak, stated = resident("VmHWM") - before, engine.cache.nbytes + workspace(engine)
    return {
        "peak_over_weights_mb": round(peak / 1e6, 1),
        "stated_mb": round(stated / 1e6, 1),
        "kv_cache_mb": round(engine.cache.nbytes / 1e6, 1),
        "workspace_mb": round(workspace(engine) / 1e6, 1),
        "ratio": round(peak / stated, 3),
        "preemptions": engine.scheduler.preemptions,
        "weights_mb": round(sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6, 1),
        "dtype": args.dtype,
        "threads": args.threads,
        "holds": 0.9 <= peak / stated <= 1.1,
    }


def shared(args: argparse.Namespace) -> dict[str, Any]:
    """The KV cache of samples of one prompt, and of as many samples of different prompts."""
    import torch
    import transformers

    from verl.models.packed import PackedModel
    from verl.rollout.base import Request, SamplingParams
    from verl.rollout.embedded.engine import EmbeddedEngine
    from verl.rollout.embedded.kv_cache import BLOCK, blocks_for

    torch.set_num_threads(args.threads)
    packed = PackedModel(transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).eval())
    rng, params = random.Random(0), SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True)
    prompts = [[rng.randrange(100, packed.vocab_size) for _ in range(args.prompt_tokens)] for _ in range(args.samples)]
    used: dict[str, int] = {}
    real: dict[str, float] = {}
    for name, some in (("one_prompt", prompts[:1] * args.samples), ("own_prompts", prompts)):
        engine = EmbeddedEngine(
            packed, eos_token_ids=(), seed=0, max_batch=args.samples, kv_memory=int(args.kv_cache_gb * 2**30)
        )
        for number, prompt in enumerate(some):
            engine.add(Request(str(number), prompt, params))
        used[name] = 0
        before = resident("VmRSS")
        while engine.unfinished:
            used[name] = max(used[name], engine.cache.num_blocks - engine.cache.available)
            engine.step()
        real[name] = round((resident("VmRSS") - before) / 1e6, 1)
        block = engine.cache.nbytes / engine.cache.num_blocks
        del engine
    full, tail = divmod(args.prompt_tokens, BLOCK)
    # The prompt's blocks once, and of each response its own and a copy of the prompt's last one where it is not full.
    most = blocks_for(args.prompt_tokens) + args.samples * blocks_for(tail + args.new_tokens)
    return {
        "samples": args.samples,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "blocks": used,
        "kv_mb": {name: round(count * block / 1e6, 1) for name, count in used.items()},
        "resident_mb": real,
        "saved": round(1 - used["one_prompt"] / used["own_prompts"], 3),
        "blocks_shared": full,
        "holds": used["one_prompt"] <= most,
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
    parser.add_argument("--shared", action="store_true", help="measure what samples of one prompt share")
    args = parser.parse_args()
    result = shared(args) if args.shared else measure(args)
    print(json.dumps(result))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
