"""The embedded engine against plain transformers, on random models of four architectures or on yours: a table.

    .venv/bin/python benchmarks/exactness.py [--device cuda] [--model DIR] [--prompts 24] [--new-tokens 64] [--seed 0]

Log-probs: the largest difference between those that came with the samples (temperature 1) and those of a forward of
transformers over the same tokens; in fp32 and fp64. Greedy: responses that differ from `generate(do_sample=False)`
in fp32; a response may leave at a position whose two best logits are closer than 1e-5, and such a one is printed.
Ends with 1 if a bound (1e-4 in fp32, 1e-9 in fp64, no other token) does not hold.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
)

from verl.models.packed import PackedModel
from verl.rollout.base import Request, SamplingParams, generate
from verl.rollout.embedded.engine import EmbeddedEngine

IDS = {"vocab_size": 1000, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
CONFIGS = {
    "llama": lambda: LlamaConfig(**IDS, **SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**IDS, **SIZES, num_key_value_heads=4),
    "gpt2": lambda: GPT2Config(**IDS, n_embd=128, n_layer=4, n_head=8, n_positions=512),
    "phi3": lambda: Phi3Config(**IDS, **SIZES, num_key_value_heads=8, sliding_window=40),
}
BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-9}


def load(kind: str, args: argparse.Namespace, dtype: torch.dtype) -> Any:
    """A model of the given kind, or the one of `--model`."""
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device).eval()
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float64)
    with torch.no_grad():  # weights as small as initial ones would let every token be equally likely
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    return model.to(args.device, dtype).eval()


def answers(model: Any, prompts: list[list[int]], samples: int, params: SamplingParams) -> dict[str, Any]:
    """The engine's samples by id, "<prompt>/<number>"."""
    engine = EmbeddedEngine(PackedModel(model), eos_token_ids=(2,), seed=0, kv_memory=256 << 20)
    requests = [Request(f"{i}/{j}", tokens, params) for i, tokens in enumerate(prompts) for j in range(samples)]
    return {sample.id: sample for sample in generate(engine, requests)}


@torch.no_grad()
def largest_difference(model: Any, prompts: list[list[int]], new_tokens: int) -> float:
    """Between the log-probs of the samples and those of one plain forward for each."""
    worst = 0.0
    for id_, sample in answers(model, prompts, 4, SamplingParams(max_new_tokens=new_tokens)).items():
        prompt = prompts[int(id_.split("/")[0])]
        tokens = torch.tensor([[*prompt, *sample.tokens]], device=model.device)
        logits = model(tokens).logits[0, len(prompt) - 1 : -1]
        plain = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0].cpu()
        worst = max(worst, float((plain - torch.tensor(sample.log_probs, dtype=plain.dtype)).abs().max()))
    return worst


def greedy_differences(kind: str, model: Any, prompts: list[list[int]], new_tokens: int) -> int:
    """Responses that leave transformers' at a position where the best token was clear."""
    wrong = 0
    found = answers(model, prompts, 1, SamplingParams(max_new_tokens=new_tokens, temperature=0.0))
    for index, prompt in enumerate(prompts):
        ids = torch.tensor([prompt], device=model.device)
        options = {"do_sample": False, "max_new_tokens": new_tokens, "output_scores": True, "eos_token_id": 2}
        plain = model.generate(
            ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, pad_token_id=0, **options
        )
        theirs, ours = plain.sequences[0, len(prompt) :].tolist(), found[f"{index}/0"].tokens
        if ours == theirs:
            continue
        step = next(i for i, pair in enumerate(zip([*ours, -1], [*theirs, -1], strict=False)) if pair[0] != pair[1])
        best = plain.scores[step][0].topk(2).values
        gap = float(best[0] - best[1])
        print(f"  {kind}: prompt {index} leaves at token {step}, where the two best logits differ by {gap:.1e}")
        wrong += gap >= 1e-5
    return wrong


def main() -> None:
    """Print the table and end with the verdict."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a model directory instead of the random models")
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, good = random.Random(args.seed), True
    prompts = [[rng.randrange(3, 1000) for _ in range(rng.randint(1, 90))] for _ in range(args.prompts)]
    for kind in ["model"] if args.model else CONFIGS:
        gaps = {dtype: largest_difference(load(kind, args, dtype), prompts, args.new_tokens) for dtype in BOUNDS}
        wrong = greedy_differences(kind, load(kind, args, torch.float32), prompts, args.new_tokens)
        good &= wrong == 0 and all(gaps[dtype] <= bound for dtype, bound in BOUNDS.items())
        print(
            f"{kind:6} log-probs differ by at most {gaps[torch.float32]:.1e} (fp32), {gaps[torch.float64]:.1e} (fp64); "
            f"greedy: {args.prompts - wrong} of {args.prompts} equal"
        )
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
