"""What do constraints on some requests cost the others beside them in one engine?

    .venv/bin/python benchmarks/constrained.py                                    # 192 free, 64 constrained, 128 tokens
    .venv/bin/python benchmarks/constrained.py --free 6 --bound 2 --new-tokens 16 --repeats 1

`--free` requests run beside `--bound` ones that have nothing, a grammar (xgrammar), a guard that reads the text every 8
tokens, or both. All begin at once, and all have their full length: the grammar never lets a response end. The number is
tokens of the free requests a second, until the last of them is there; kinds take turns, and `change` is the median of
their ratios to the run without constraints just before. Exit status 1 if a kind costs the others more than `--limit`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

from rollout import MODEL, prompts

os.environ["HF_HUB_OFFLINE"] = "1"

KINDS = ("grammar", "guard", "both")
#: Words without end: the mask of each token is another, and none holds the end of the sequence.
WORDS = 'root ::= word " " root\nword ::= [A-Za-z] [a-z]* [,.]?'


def requests(args: argparse.Namespace, vocabulary: int, kind: str) -> list[Any]:
    """Free requests first, then those that are bound by `kind`."""
    from verl.rollout.base import Request, SamplingParams
    from verl.rollout.constrained import ScoreGuard
    from verl.rollout.grammar import Grammar

    grammar = Grammar.ebnf(WORDS) if kind in ("grammar", "both") else None
    guard = ScoreGuard(lambda texts: [-text.count("\x00") for text in texts], -1, every=8)
    texts = prompts(args, vocabulary)
    free, bound = (SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=ignore) for ignore in (True, not grammar))
    found = [Request(f"free/{row}", texts[row % len(texts)], free) for row in range(args.free)]
    for row in range(args.bound):
        own = guard if kind in ("guard", "both") else None
        found.append(Request(f"bound/{row}", texts[row % len(texts)], bound, grammar=grammar, guard=own))
    return found


def speed(engine: Any, work: list[Any], new_tokens: int) -> float:
    """Tokens of the free requests a second."""
    from verl.rollout.base import generate

    engine.load_shards((), engine.policy_version + 1)  # forget cached prompts
    start, last, tokens = time.perf_counter(), 0.0, 0
    for sample in generate(engine, work):
        if len(sample.tokens) != new_tokens:
            raise SystemExit(f"{sample.id} has {len(sample.tokens)} tokens ({sample.finish}): not the agreed work")
        if sample.id.startswith("free/"):
            last, tokens = time.perf_counter(), tokens + len(sample.tokens)
    return tokens / (last - start)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second beside each kind, and what they change."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from verl.models.loading import eos_token_ids
    from verl.models.packed import PackedModel
    from verl.rollout.embedded.engine import EmbeddedEngine
    from verl.rollout.hf import HFEngine

    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    options = {"eos_token_ids": eos_token_ids(model), "seed": 0, "tokenizer": tokenizer, "max_batch": args.batch}
    make: Any = EmbeddedEngine if args.engine == "embedded" else HFEngine
    engine = make(PackedModel(model) if args.engine == "embedded" else model, **options)
    work = {kind: requests(args, model.config.vocab_size, kind) for kind in ("nothing", *KINDS)}
    short = argparse.Namespace(**{**vars(args), "free": 1, "bound": 1, "new_tokens": 4})
    speed(engine, requests(short, model.config.vocab_size, "both"), 4)  # compiles the grammar
    speeds: dict[str, list[float]] = {kind: [] for kind in work}
    changes: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(args.repeats):
        for kind in KINDS:
            plain = speed(engine, work["nothing"], args.new_tokens)
            speeds["nothing"].append(plain)
            speeds[kind].append(speed(engine, work[kind], args.new_tokens))
            changes[kind].append(speeds[kind][-1] / plain - 1)
    change = {kind: round(statistics.median(values), 4) for kind, values in changes.items()}
    return {
        "engine": args.engine,
        "free": args.free,
        "bound": args.bound,
        "new_tokens": args.new_tokens,
        "free_tokens_per_second_beside": {kind: round(statistics.median(v), 1) for kind, v in speeds.items()},
        "change": change,
        "limit": args.limit,
        "holds": all(value >= -args.limit for value in change.values()),
        "dtype": args.dtype,
        "threads": args.threads,
    }


def main() -> None:
    """Measure, print a line of JSON, and say by the exit status whether the limit holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engine", choices=("embedded", "hf"), default="embedded")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--free", type=int, default=192, help="requests without constraints")
    parser.add_argument("--bound", type=int, default=64, help="requests with constraints")
    parser.add_argument("--prompts", type=int, default=32, help="different prompts")
    parser.add_argument("--prompt-tokens", type=int, default=94)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=256, help="responses at a time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=float, default=0.05, help="what the others may lose")
    args = parser.parse_args()
    args.natural = False
    result = measure(args)
    print(json.dumps(result))
    sys.exit(not result["holds"])


if __name__ == "__main__":
    main()
