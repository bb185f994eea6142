"""Does the memory of training stay flat? GRPO steps whose prompts and responses all have other lengths.

    .venv/bin/python benchmarks/memory_over_steps.py                     # SmolLM2-135M, 100 steps
    .venv/bin/python benchmarks/memory_over_steps.py --hidden 192        # a small random model: minutes
    .venv/bin/python benchmarks/memory_over_steps.py --no-limits         # libraries keep what they like

One line of JSON: the peak of the resident memory after five steps and after all, in MB. Fails if it grew by over 3 %.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

MODEL = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"
WARM_UP = 5
ALLOWED = 1.03


def peak_mb() -> float:
    """Highest resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def small_model(args: argparse.Namespace, directory: str) -> str:
    """A random model of this width with the tokenizer of the large one."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    width = args.hidden
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 4, "num_attention_heads": 3}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def measure(args: argparse.Namespace) -> dict[str, Any]:
    if args.limits:
        from verl._host.device import limit_library_memory

        limit_library_memory()
    import torch

    import verl

    torch.set_num_threads(args.threads)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as directory:
        model = small_model(args, directory) if args.hidden else args.model
        actor = verl.Actor(model, dtype=args.dtype, kv_cache_gb=0.2)
        updater = verl.Updater("grpo", actor=actor)
        reward = verl.Reward(lambda texts: [float(len(t)) for t in texts])
        peaks = []
        for step in range(args.steps):
            # The first step is the largest: what grows afterwards is not the work.
            new = rng.randint(4, args.new_tokens) if step else args.new_tokens
            lengths = [rng.randint(1, args.prompt_tokens) if step else args.prompt_tokens for _ in range(4)]
            prompts = [" one" * length for length in lengths]
            samples = actor.generate_sequences(prompts, n=4, max_new_tokens=new, ignore_eos=True)
            updater.update(samples, reward.get_reward(samples))
            peaks.append(peak_mb())
            print(f"step {step + 1}: {peaks[-1]:.0f} MB", file=sys.stderr, flush=True)
    growth = peaks[-1] / peaks[min(WARM_UP, len(peaks)) - 1]
    return {
        "peak_mb_after_5": round(peaks[min(WARM_UP, len(peaks)) - 1], 1),
        "peak_mb": round(peaks[-1], 1),
        "every_tenth_mb": [round(peak) for peak in peaks[::10]],
        "growth": round(growth, 4),
        "steps": args.steps,
        "dtype": args.dtype,
        "limits": args.limits,
        "holds": growth <= ALLOWED,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--hidden", type=int, help="width of a small random model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-limits", dest="limits", action="store_false")
    result = measure(parser.parse_args())
    print(json.dumps(result))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
