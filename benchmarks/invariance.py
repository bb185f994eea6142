"""Does a sample depend on its company? The same requests alone, all at once, and with too little KV cache.

    .venv/bin/python benchmarks/invariance.py                    # 256 sequences of SmolLM2-135M in fp32
    .venv/bin/python benchmarks/invariance.py --batch-invariant  # every forward of one shape, and what that costs
    .venv/bin/python benchmarks/invariance.py --alone 256 --new-tokens 128

Every eighth sequence is greedy, the others are sampled at temperature 1. A sequence whose tokens differ from those in
the batch is looked at where it first differs: if the uniform number lies within 1e-5 of a boundary of the CDF, or the
two best logits (greedy) within 1e-5, rounding decided; such a sequence is exempt, and printed. Anything else is a
failure, and so are more exempt sequences than one in a thousand (and more than one). One line of JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

MODEL = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"
RESOLUTION = 1e-5


def requests(args: argparse.Namespace, vocabulary: int) -> list[Any]:
    """`--prompts` of random tokens and lengths, some with a common beginning, `--samples` each."""
    from verl.rollout.base import Request, SamplingParams

    rng = random.Random(args.seed)
    common = [rng.randrange(100, vocabulary) for _ in range(70)]
    found = []
    for i in range(args.prompts):
        beginning = common[: rng.choice((0, 0, 40, 70))]
        prompt = beginning + [rng.randrange(100, vocabulary) for _ in range(rng.randint(5, args.prompt_tokens))]
        for j in range(args.samples):
            temperature = 0.0 if j % 8 == 7 else 1.0
            params = SamplingParams(max_new_tokens=args.new_tokens, temperature=temperature, ignore_eos=True)
            found.append(Request(f"{i}/{j}", prompt, params))
    return found


def margin(packed: Any, request: Any, tokens: list[int], seed: int) -> float:
    """How far the choice of the token after `tokens` was from another one: in probability, or in logits if greedy."""
    import torch

    from verl.rollout.embedded.sampler import stream_key, uniforms

    ids = torch.tensor([[*request.prompt_tokens, *tokens]])
    with torch.no_grad():
        logits = packed.model(ids).logits[0, -1].double()
    if request.params.temperature == 0:
        best = logits.topk(2).values
        return float(best[0] - best[1])
    boundaries = logits.softmax(-1).cumsum(-1)
    uniform = float(uniforms([stream_key(seed, request.id)], [len(tokens)])[0])
    return float((boundaries - uniform).abs().min())


def run(engine: Any, work: list[Any]) -> tuple[dict[str, Any], float]:
    """The samples of these requests by id, and the seconds they took."""
    from verl.rollout.base import generate

    engine.load_shards((), engine.policy_version + 1)  # forget cached prompts
    start = time.perf_counter()
    samples = {sample.id: sample for sample in generate(engine, work)}
    return samples, time.perf_counter() - start


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that was found, and whether it holds."""
    import torch
    import transformers

    from verl.models.packed import PackedModel
    from verl.rollout.embedded.engine import EmbeddedEngine
    from verl.rollout.embedded.kv_cache import KVCache, blocks_for

    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    packed = PackedModel(transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval())
    work = requests(args, packed.vocab_size)
    block = KVCache.block_bytes(packed.num_layers, packed.num_kv_heads, packed.head_dim, dtype)
    longest = max(blocks_for(len(r.prompt_tokens)) for r in work) + blocks_for(args.new_tokens)

    def engine(blocks: int, invariant: bool = args.batch_invariant) -> Any:
        return EmbeddedEngine(
            packed,
            eos_token_ids=(),
            seed=args.seed,
            max_batch=len(work),
            kv_memory=blocks * block,
            batch_invariant=invariant,
            compiled=not args.torch,
        )

    roomy, tight = engine(longest * len(work)), engine(longest * max(2, len(work) // 8))
    together, seconds = run(roomy, work)
    chosen = random.Random(args.seed).sample(work, min(args.alone, len(work)))
    alone = {}
    for request in chosen:
        alone.update(run(roomy, [request])[0])
    preempted, _ = run(tight, work)
    result: dict[str, Any] = {
        "model": Path(args.model).name,
        "dtype": args.dtype,
        "threads": args.threads,
        "batch_invariant": args.batch_invariant,
        "sequences": len(work),
        "alone": len(alone),
        "tokens_each": args.new_tokens,
        "preemptions": tight.scheduler.preemptions,
        "kv_tokens_when_tight": tight.cache.num_blocks * tight.cache.block,
    }
    holds = tight.scheduler.preemptions > 0
    by_id = {request.id: request for request in work}
    for name, others in (("alone", alone), ("preempted", preempted)):
        differing = [i for i in others if others[i].tokens != together[i].tokens]
        exempt = 0
        for i in differing:
            pairs = enumerate(zip(others[i].tokens, together[i].tokens, strict=True))
            at = next(index for index, (a, b) in pairs if a != b)
            distance = margin(packed, by_id[i], together[i].tokens[:at], args.seed)
            exempt += distance < RESOLUTION
            print(f"{name}: sequence {i} differs from token {at} on, {distance:.2e} from another choice")
        bits = sum(others[i].log_probs != together[i].log_probs for i in others)
        result |= {f"differ_{name}": len(differing), f"exempt_{name}": exempt, f"other_bits_{name}": bits}
        holds &= exempt == len(differing) and exempt <= max(1, len(others) // 1000)
        holds &= not args.batch_invariant or bits == 0
    if args.batch_invariant:
        _, plain = run(engine(longest * len(work), invariant=False), work)
        result["cost"] = f"{seconds / plain:.2f} x the time of the plain engine"
    return {**result, "holds": bool(holds)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument(
        "--prompt-tokens", type=int, default=94, help="of the longest prompt, beside a common beginning"
    )
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--alone", type=int, default=32, help="sequences that are also generated alone")
    parser.add_argument("--batch-invariant", action="store_true", help="every bit must be the same")
    parser.add_argument("--torch", action="store_true", help="without the compiled kernels")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    result = compare(parser.parse_args())
    print(json.dumps(result))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
