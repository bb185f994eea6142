"""A response that is being generated, and how its next token is sampled."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl._host.device import HostCopy, to_device
from verl.data.text import ResponseText
from verl.errors import RolloutError, shown
from verl.kernels.compiled import Kernels
from verl.rollout.base import Finish, Guard, LongPromptError, Request, Sample
from verl.rollout.embedded.sampler import SamplingFlags, sample, sampling_table, stream_key, uniforms
from verl.rollout.stop_strings import StopWatch, special_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.rollout.grammar import GrammarMask


@dataclass(eq=False)
class PromptState:
    """A prompt with running responses, which share its blocks.

    Attributes:
        computed: number of its leading tokens whose keys and values are in the cache after the steps scheduled so far.
        hidden: `[d]`, the final state of its last token, once that is computed.
        digests: `prefix_digests` of a turn's prompt, which is cached for later ones; else empty.
    """

    tokens: Sequence[int]
    blocks: list[int]
    digests: list[bytes]
    computed: int = 0
    hidden: Tensor | None = None
    running: list[Response] = field(default_factory=list)


class ResponseOptions(NamedTuple):
    """What an engine's responses have in common: the run's seed, prompt and response together at most `max_length`."""

    seed: int
    vocab_size: int
    max_length: int
    eos_token_ids: Sequence[int]
    tokenizer: PreTrainedTokenizerBase | None


class Response:
    """The tokens of a request so far.

    Attributes:
        in_flight: tokens that are sampled and not read by the host yet.
        prompt_state: None while it waits.
        blocks: of the KV cache, its own.
        computed: number of its leading tokens whose keys and values are in the cache after the steps scheduled so far;
            a token in flight counts.
        row: its row in the last sampled tokens.

    Raises:
        RolloutError: the request is invalid.
    """

    def __init__(self, request: Request, options: ResponseOptions) -> None:
        seed, vocab_size, max_length, eos_token_ids, tokenizer = options
        self.request, self.id, self.params, self.prompt = request, request.id, request.params, request.prompt_tokens
        guard, grammar, params, name = request.guard, request.grammar, request.params, f"request '{request.id}'"
        check_prompt(request.id, self.prompt, vocab_size, max_length)
        self.prompt_key = tuple(self.prompt)
        self.max_new_tokens = min(params.max_new_tokens, max_length - len(self.prompt))
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        self.watch: StopWatch | None = None
        self.mask: GrammarMask | None = None
        if tokenizer is not None:
            ends |= {token for stop in params.stop if (token := special_token(tokenizer, stop)) is not None}
            if params.stop or guard is not None:
                self.watch = StopWatch(ResponseText(tokenizer, eos_token_ids), params.stop, params.min_new_tokens)
        elif params.stop or guard is not None or grammar is not None:
            raise RolloutError(f"{name} has stop strings, a guard or a grammar; the engine was given no tokenizer")
        self.end_tokens = frozenset(token for token in ends if 0 <= token < vocab_size)
        if len(self.end_tokens) == vocab_size and params.min_new_tokens:
            why = "every token of the vocabulary ends the response, so it cannot have"
            raise RolloutError(f"{name}: {why} min_new_tokens={params.min_new_tokens}")
        if guard is not None and guard.every < 1:
            raise RolloutError(f"{name}: its guard checks every {guard.every} tokens, it must be at least 1")
        if grammar is not None and tokenizer is not None:
            self.mask = grammar.mask(tokenizer, vocab_size, self.end_tokens)
        self.stream = stream_key(seed, request.id)
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.top_log_probs: list[list[tuple[int, float]]] = []
        self.policy_version = 0
        self.finish: Finish | None = None if self.max_new_tokens else "length"
        #: The `finish` where a stop string or a guard ends it: under a grammar it is incomplete then.
        self.cut: Finish = "stop" if grammar is None else "length"
        self.in_flight = self.computed = self.row = 0
        self.prompt_state: PromptState | None = None
        self.blocks: list[int] = []

    @property
    def sampled(self) -> int:
        """Tokens that are sampled, those in flight included."""
        return len(self.tokens) + self.in_flight

    def append(self, token: int, log_prob: float, policy_version: int) -> None:
        """Add the next token; sets `finish` if it is the last."""
        if not self.tokens:
            self.policy_version = policy_version
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if self.request.on_token is not None:
            self.request.on_token(token)
        ended = token in self.end_tokens
        last = ended or len(self.tokens) >= self.max_new_tokens
        stopped = self.watch is not None and bool(self.params.stop) and self.watch.saw_stop(self.tokens, final=last)
        if ended:
            self.finish = "stop"
        elif stopped:
            self.finish = self.cut
        elif last:
            self.finish = "length"

    @property
    def is_edited(self) -> bool:
        """Whether the logits must be edited before its next token is sampled."""
        bans_ends = self.params.min_new_tokens > 0 and self.sampled < self.params.min_new_tokens
        return bool(self.request.processors) or self.mask is not None or (bans_ends and bool(self.end_tokens))

    def edit(self, logits: Tensor) -> Tensor:
        """The logits `[V]` to sample the next token from; the given ones are overwritten.

        Raises:
            RolloutError: a processor returns logits of another shape.
        """
        shape = tuple(logits.shape)
        for processor in self.request.processors:
            logits = processor(self.tokens, logits)
            if (got := tuple(getattr(logits, "shape", ()))) != shape:
                raise RolloutError(f"a logits processor of sample '{self.id}' must return {shape}, gave {got}")
        if self.mask is not None:
            logits = self.mask(self.tokens, logits)
        if self.end_tokens and self.sampled < self.params.min_new_tokens:
            ends = to_device(torch.tensor(sorted(self.end_tokens)), logits.device)
            logits.index_fill_(0, ends, -torch.inf)
        return logits

    def text(self) -> str | None:
        """The text so far, for stop strings or a guard."""
        return None if self.watch is None else self.watch.read(self.tokens, final=self.finish is not None)

    def sample(self, policy_version: int) -> Sample:
        """The finished sample; one without tokens gets the current version."""
        version = self.policy_version if self.tokens else policy_version
        end, tops = self.finish or "abort", self.top_log_probs
        return Sample(self.id, self.tokens, self.log_probs, end, version, self.text(), top_log_probs=tops)


def sample_next(
    responses: Sequence[Response], logits: Tensor, policy_version: int, kernels: Kernels | None = None
) -> PendingTokens:
    """Sample the next token of each response from its row of `logits` `[N, V]`, which may be overwritten. Rows beyond
    the responses are padding.

    Args:
        kernels: those for the dtype of the logits; None: the torch code samples.

    Raises:
        RolloutError: a processor returns something invalid.
    """
    edits = {row: r.edit for row, r in enumerate(responses) if r.is_edited}
    tops = {row: logits[row].clone() for row, response in enumerate(responses) if response.request.top_log_probs}
    flags, table = next_sampling(responses, len(logits))
    sampled = sample(logits, flags, to_device(torch.from_numpy(table), logits.device), kernels, edits)
    return PendingTokens(responses, *sampled, policy_version, logits.dtype, edits, tops)


def next_sampling(responses: Sequence[Response], rows: int) -> tuple[SamplingFlags, npt.NDArray[np.float64]]:
    """The `sampling_table` of the responses' next tokens, padded to `rows`."""
    padding = rows - len(responses)
    numbers = np.pad(uniforms([r.stream for r in responses], [r.sampled for r in responses]), (0, padding))
    return sampling_table([*(r.params for r in responses), *[responses[0].params] * padding], numbers)


@dataclass(eq=False)
class PendingTokens:
    """Sampled tokens that the host has not read: tokens in flight.

    Attributes:
        responses: those that they are for.
        tokens: `[N]` int64, on the device; rows beyond the responses are padding.
        edited: rows whose logits were edited.
        tops: of rows that ask for the log-probs of other tokens, their logits.
    """

    responses: Sequence[Response]
    tokens: Tensor
    log_probs: InitVar[Tensor]
    policy_version: int
    dtype: torch.dtype
    edited: Container[int] = ()
    tops: Mapping[int, Tensor] = field(default_factory=dict)

    def __post_init__(self, log_probs: Tensor) -> None:
        self._copy = HostCopy(self.tokens, log_probs)
        for response in self.responses:
            response.in_flight += 1

    def take(self) -> None:
        """Wait for the tokens, and add them to those responses that have not ended meanwhile.

        Raises:
            RolloutError: logits were not finite, or a processor or guard returned something invalid.
        """
        columns = self._copy.read()
        for response in self.responses:
            response.in_flight -= 1
        rows = [
            (*each, row) for row, each in enumerate(zip(self.responses, *columns, strict=False)) if not each[0].finish
        ]
        for response, _, log_prob, row in rows:
            if not (math.isfinite(log_prob) or (log_prob == -math.inf and row in self.edited)):
                raise RolloutError(
                    f"the logits of sample '{response.id}' at token {len(response.tokens)} are not finite: "
                    f"the weights of policy version {self.policy_version} are broken, or overflow in {self.dtype}"
                    + (", or a logits processor gave NaN or plus infinity" if response.request.processors else "")
                )
        for response, token, log_prob, row in rows:
            if log_prob == -math.inf:
                response.finish = "reject"
                continue
            if row in self.tops:
                logits = self.tops[row]
                values, likeliest = logits.double().topk(min(response.request.top_log_probs, len(logits)))
                tops = log_prob + (values - logits[int(token)].double()) / (response.params.temperature or 1.0)
                response.top_log_probs.append([*zip(likeliest.tolist(), tops.tolist(), strict=True)])
            response.append(int(token), log_prob, self.policy_version)
        _check_guards([response for response, *_ in rows])


def _check_guards(responses: Sequence[Response]) -> None:
    """Call each guard once, with all texts that it checks now.

    Raises:
        RolloutError: a guard does not return one verdict per text.
    """
    due: dict[int, tuple[Guard, list[Response]]] = {}
    for response in responses:
        guard = response.request.guard
        if guard is not None and (response.finish is not None or len(response.tokens) % guard.every == 0):
            due.setdefault(id(guard), (guard, []))[1].append(response)
    for guard, asked in due.values():
        verdicts = list(guard([response.text() or "" for response in asked]))
        if len(verdicts) != len(asked) or not set(verdicts) <= {None, "stop", "reject"}:
            raise RolloutError(
                f"the guard {shown(guard)} must return None, 'stop' or 'reject' for {len(asked)} texts, not {verdicts}"
            )
        for response, verdict in zip(asked, verdicts, strict=True):
            if verdict is not None and (verdict == "reject" or response.finish is None):
                response.finish = verdict if verdict == "reject" else response.cut


def check_prompt(name: str, prompt: Sequence[int], vocab_size: int, max_length: int) -> None:
    """Raises RolloutError for a prompt that no engine can continue."""
    if not prompt:
        raise RolloutError(f"request '{name}': the prompt is empty; begin it with the tokenizer's first token at least")
    if (wrong := next((token for token in prompt if not 0 <= token < vocab_size), None)) is not None:
        raise RolloutError(f"request '{name}': token {wrong} is outside the vocabulary of {vocab_size}")
    if len(prompt) >= max_length:
        raise LongPromptError(
            f"request '{name}': its prompt has {len(prompt)} tokens, prompt and response together may have {max_length}"
        )
