"""A response in the making: what our engines keep of a request, and how its next token is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.errors import RolloutError
from verl.rollout.base import Finish, Request, Sample
from verl.rollout.randomness import stream_key, uniforms
from verl.rollout.sampler import SamplingTable, sample
from verl.rollout.stop_strings import StopWatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Response:
    """The tokens of a request so far.

    Raises:
        RolloutError: the request can never be answered.
    """

    def __init__(
        self,
        request: Request,
        *,
        seed: int,
        vocab_size: int,
        max_length: int,
        eos_token_ids: Sequence[int],
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        self.id = request.id
        self.params = request.params
        self.prompt = list(request.prompt_tokens)
        _check_prompt(request.id, self.prompt, vocab_size, max_length)
        self.max_new_tokens = min(self.params.max_new_tokens, max_length - len(self.prompt))
        ends = () if self.params.ignore_eos else eos_token_ids
        self.end_tokens = frozenset(t for t in (*ends, *self.params.stop_token_ids) if 0 <= t < vocab_size)
        if len(self.end_tokens) == vocab_size and self.params.min_new_tokens:
            raise RolloutError(
                f"request '{request.id}': every token of the vocabulary ends the response, so it cannot have "
                f"min_new_tokens={self.params.min_new_tokens}"
            )
        self.watch: StopWatch | None = None
        if self.params.stop:
            if tokenizer is None:
                raise RolloutError(f"request '{request.id}' has stop strings; the engine was given no tokenizer")
            self.watch = StopWatch(tokenizer, self.params.stop)
        self.stream = stream_key(seed, request.id)
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.policy_version = 0
        self.finish: Finish | None = None if self.max_new_tokens else "length"

    def append(self, token: int, log_prob: float, policy_version: int) -> None:
        """Take the next token; sets `finish` when it is the last."""
        if not self.tokens:
            self.policy_version = policy_version
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        ended = token in self.end_tokens
        last = ended or len(self.tokens) >= self.max_new_tokens
        if self.watch is not None and (last or len(self.tokens) >= self.params.min_new_tokens):
            ended |= self.watch.saw_stop(self.tokens, final=last)
        if ended:
            self.finish = "stop"
        elif last:
            self.finish = "length"

    def sample(self, policy_version: int) -> Sample:
        """The finished sample; a response that ended before its first token carries the version of now."""
        version = self.policy_version if self.tokens else policy_version
        text = None if self.watch is None else self.watch.text
        return Sample(self.id, self.tokens, self.log_probs, self.finish or "abort", version, text)


def draw(responses: Sequence[Response], logits: Tensor, policy_version: int, compiled: bool = True) -> None:
    """The next token of each response from its row of `logits` `[N, V]`, which may be overwritten.

    Raises:
        RolloutError: logits that are not finite.
    """
    banned = {
        row: tuple(r.end_tokens)
        for row, r in enumerate(responses)
        if r.end_tokens and len(r.tokens) < r.params.min_new_tokens
    }
    numbers = torch.from_numpy(uniforms([r.stream for r in responses], [len(r.tokens) for r in responses]))
    table = SamplingTable.of([r.params for r in responses], banned, logits.device)
    tokens, log_probs = sample(logits, numbers.to(logits.device), table, compiled)
    if not bool(log_probs.isfinite().all()):
        row = int((~log_probs.isfinite()).nonzero()[0])
        raise RolloutError(
            f"the logits of sample '{responses[row].id}' at token {len(responses[row].tokens)} are not finite: "
            f"the weights of policy version {policy_version} are broken, or overflow in {logits.dtype}"
        )
    for response, token, log_prob in zip(responses, tokens.tolist(), log_probs.tolist(), strict=True):
        response.append(token, log_prob, policy_version)


def _check_prompt(name: str, prompt: list[int], vocab_size: int, max_length: int) -> None:
    if not prompt:
        raise RolloutError(f"request '{name}': the prompt is empty; begin it with the tokenizer's first token at least")
    if not all(0 <= token < vocab_size for token in prompt):
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise RolloutError(f"request '{name}': token {wrong} is outside the vocabulary of {vocab_size}")
    if len(prompt) >= max_length:
        raise RolloutError(
            f"request '{name}': its prompt has {len(prompt)} tokens, prompt and response together may have {max_length}"
        )
