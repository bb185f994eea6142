"""Requests in vLLM's terms, in process and over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.errors import RolloutError
from verl.rollout.base import Finish, Request
from verl.rollout.choice import RUNNER
from verl.rollout.embedded.response import check_prompt
from verl.rollout.embedded.sampler import stream_key

#: vLLM's words for how a response ended -> ours.
FINISH: Mapping[Any, Finish] = {"stop": "stop", "length": "length"}


def prompt_scores(output: Any, response_tokens: Sequence[int]) -> list[float]:
    """Log-probs of the response at the end of a prompt."""
    entries = output.prompt_logprobs[-len(response_tokens) :] if response_tokens else []
    return [float(entry[token].logprob) for entry, token in zip(entries, response_tokens, strict=True)]


def sampling_arguments(request: Request, seed: int, eos_token_ids: Sequence[int], room: int) -> dict[str, Any]:
    """The request's settings under vLLM's names. `room`: the longest that the response may become."""
    params = request.params
    ends = () if params.ignore_eos else eos_token_ids
    return {
        "max_tokens": min(params.max_new_tokens, room),
        "min_tokens": min(params.min_new_tokens, room),
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        # A server takes what is missing from the model's generation_config.
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": stream_key(seed, request.id) & 0x7FFF_FFFF_FFFF_FFFF,
        "stop": list(params.stop),
        "stop_token_ids": sorted({*ends, *params.stop_token_ids}),
        "ignore_eos": True,  # the end tokens are listed, since transformers and vLLM differ in theirs
        "logprobs": 0,
        "detokenize": bool(params.stop),
        # Stop strings are looked for in the text that rewards read.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        **({"structured_outputs": {request.grammar.kind: request.grammar.text}} if request.grammar else {}),
    }


def sampled(log_probs: Any) -> list[float]:
    """Log-probs of the sampled tokens from vLLM's flat record, which has one entry per token."""
    return [] if log_probs is None else list(map(float, log_probs.logprobs))


def check_request(request: Request, is_scaled: bool, vocab_size: int, max_length: int) -> None:
    """Raises RolloutError for what vLLM cannot answer; `is_scaled`: see `WorkerExtension.verl_prepare`."""
    if request.processors or request.guard is not None or request.top_log_probs:
        lacks = "logits processors, guards or log-probs of other tokens"
        raise RolloutError(f"request '{request.id}': vLLM has no {lacks}: use the engine embedded or hf")
    check_prompt(request.id, request.prompt_tokens, vocab_size, max_length)
    if request.params.temperature not in (0, 1) and not is_scaled:
        raise RolloutError(
            f"request '{request.id}': this vLLM has no log-probs at temperature {request.params.temperature:g}, only "
            f"at 1: start it with {RUNNER}=0, or use temperature 1 or another engine"
        )
