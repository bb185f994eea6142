"""GRPO from scratch: SmolLM2 learns sums in one file, with nothing hidden.

    python examples/grpo_from_scratch.py                    # ten steps on models/SmolLM2-135M-Instruct
    python examples/grpo_from_scratch.py --steps 3 --model DIRECTORY

This is what `verl.Trainer` does in one process, written out: prompts, sampling, rewards, advantages, the loss, AdamW.
Of the package it uses `PackedModel` (a transformers model over flat tokens, without padding) and the random numbers of
samples, so on the same prompts the first losses are those of

    actor = verl.Actor(MODEL, dtype="float32", optim={"lr": 1e-5})
    trainer = verl.Trainer(actor, reward_fn=REWARD, algorithm="grpo", n=8)

 What `Trainer` has besides: micro-batches by tokens, engines, ranks, checkpoints, logs.

Shapes: R response tokens of all samples, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from verl.attention.segments import pack_rows
from verl.models.packed import PackedModel
from verl.rollout.embedded.sampler import stream_key, uniforms

PROMPTS, SAMPLES = 16, 8  # a step: so many prompts, and samples of each
ROWS = 32  # samples in one forward and backward pass
CLIP, CLIP_NEGATIVE = 0.2, 3.0
SEED = 0


# ---- prompts and rewards -----------------------------------------------------------------------------------------


def problem(number: int) -> tuple[str, int]:
    """A sum of two numbers below 100, and its result; the same for the same number."""
    generator = random.Random(number)
    a, b = generator.randrange(100), generator.randrange(100)
    return f"What is {a} + {b}? Answer with the number alone.", a + b


def encode(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """The chat of one question up to where the reply begins, as token ids."""
    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def reward(response: str, answer: int) -> float:
    """1 if the last number of the response is the answer."""
    numbers = re.findall(r"-?\d+", response)
    return float(bool(numbers) and int(numbers[-1]) == answer)


# ---- sampling ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def sample(
    model: PreTrainedModel, prompts: list[list[int]], names: list[str], length: int, end: int
) -> list[list[int]]:
    """One response to each prompt, at temperature 1, of at most `length` tokens; the token `end` is its last.

    A token is drawn by inverse CDF: the first whose cumulative probability exceeds a uniform number. That number is a
    hash of the seed, the sample's name and the token's position, so it does not matter what is sampled beside it.
    """
    width = max(map(len, prompts))
    tokens = torch.tensor([[end] * (width - len(prompt)) + prompt for prompt in prompts])  # padded on the left
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    keys = [stream_key(SEED, name) for name in names]
    responses: list[list[int]] = [[] for _ in prompts]
    cache = None
    for step in range(length):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        output = model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        cache = output.past_key_values
        cumulative = output.logits[:, -1].double().softmax(-1).cumsum(-1)
        draws = torch.from_numpy(uniforms(keys, [step] * len(keys)))[:, None]
        tokens = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
        tokens = tokens.clamp(max=cumulative.shape[1] - 1)
        for response, token in zip(responses, tokens[:, 0].tolist(), strict=True):
            if not response or response[-1] != end:
                response.append(token)
        if all(response[-1] == end for response in responses):
            break
        mask = torch.cat([mask, torch.ones_like(tokens)], 1)
    return responses


# ---- advantages and the loss -------------------------------------------------------------------------------------


def group_advantages(rewards: Tensor) -> Tensor:
    """Rewards `[prompts, samples]`, centred and scaled within the samples of a prompt (arXiv:2402.03300, 4.1.2)."""
    scaled = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-6)
    # A group whose rewards are all equal says nothing, and rounding must not say otherwise.
    return torch.where((rewards == rewards[:, :1]).all(-1, keepdim=True), 0.0, scaled)


def policy_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> Tensor:
    """PPO's clipped loss of each token `[R]`, bounded for negative advantages (dual clip)."""
    ratio = (log_probs - old_log_probs).exp()
    clipped = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
    return torch.where(advantages < 0, torch.min(clipped, -advantages * CLIP_NEGATIVE), clipped)


def update(
    packed: PackedModel,
    optimizer: torch.optim.Optimizer,
    prompts: list[list[int]],
    responses: list[list[int]],
    advantages: list[float],
) -> tuple[float, float]:
    """One optimizer step on all samples; the loss, a mean over all their tokens, and the norm of its gradient."""
    total = sum(map(len, responses))
    loss = 0.0
    for start in range(0, len(responses), ROWS):
        rows = slice(start, start + ROWS)
        flat = pack_rows(prompts[rows], responses[rows])  # samples of a prompt share its forward
        hidden = packed.hidden(flat.tokens, flat.positions, flat.context)
        log_probs, _ = packed.log_probs(hidden[flat.predict], flat.targets)  # [R]
        lengths = torch.tensor([len(response) for response in responses[rows]])
        of_token = torch.tensor(advantages[rows], dtype=log_probs.dtype).repeat_interleave(lengths)  # [R]
        # The samples are of these very weights, so the old log-probs are the present ones without their gradient.
        part = policy_loss(log_probs, log_probs.detach(), of_token).sum() / total
        part.backward()
        loss += part.item()
    norm = torch.nn.utils.clip_grad_norm_(packed.model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm.item()


# ---- the loop ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="a directory, or a name on the hub")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--tokens", type=int, default=24, help="of a response, at most")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--json", action="store_true", help="one JSON object a step")
    options = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    end = tokenizer.eos_token_id
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    packed = PackedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, eps=1e-6, weight_decay=0.0)

    for step in range(options.steps):
        began = time.perf_counter()
        problems = [problem(step * PROMPTS + row) for row in range(PROMPTS)]
        prompts = [encode(tokenizer, question) for question, _ in problems for _ in range(SAMPLES)]
        answers = [answer for _, answer in problems for _ in range(SAMPLES)]
        names = [f"s{step}.{row}/{number}" for row in range(PROMPTS) for number in range(SAMPLES)]

        responses = sample(model, prompts, names, options.tokens, end)
        texts = tokenizer.batch_decode([[token for token in response if token != end] for response in responses])
        rewards = [reward(text, answer) for text, answer in zip(texts, answers, strict=True)]
        advantages = group_advantages(torch.tensor(rewards, dtype=torch.float64).view(PROMPTS, SAMPLES))
        loss, norm = update(packed, optimizer, prompts, responses, advantages.flatten().tolist())

        record = {"step": step + 1, "reward": sum(rewards) / len(rewards), "loss": loss, "grad_norm": norm}
        seconds = time.perf_counter() - began
        line = "step {step}: reward {reward:.3f}, loss {loss:+.6f}, gradient norm {grad_norm:.3f}".format(**record)
        print(json.dumps(record) if options.json else f"{line}, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
