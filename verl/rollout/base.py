"""The interface of rollout engines: requests in, samples out as they finish.

Log-probs are of the temperature-scaled logits over the whole vocabulary, before top-k, top-p,
min-p and `min_new_tokens` (greedy decoding: at temperature 1): what the trainer computes for the same
tokens. The uniform number behind token t of a sample is a hash of (run seed, sample id, t).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from verl._base.checked import checked
from verl._base.record import AsTuple, Natural, Portion, Share, Strings
from verl.errors import ConfigError, RolloutError, nearest, shown
from verl.rollout.options import Temperature
from verl.weights.shard import Shard

if TYPE_CHECKING:
    from torch import Tensor

    from verl.rollout.grammar import Grammar

Finish = Literal["stop", "length", "abort", "reject"]


class LongPromptError(RolloutError):
    """A prompt leaves the model no room for a response."""


@checked
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one response is sampled.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off, and apply in this order after the
    temperature. Before `min_new_tokens` tokens no end-of-sequence or stop token is sampled, and stop strings have no
    effect. `stop` strings and `stop_token_ids` end a response, their tokens included; a string that spells a special
    token means that token. `ignore_eos` continues to `max_new_tokens`.

    Raises:
        ConfigError: a value is out of range.
    """

    max_new_tokens: Natural = 128
    min_new_tokens: Natural = 0
    temperature: Temperature = 1.0
    top_k: Natural = 0
    top_p: Portion = 1.0
    min_p: Share = 0.0
    stop: Strings = ()
    stop_token_ids: Annotated[tuple[Natural, ...], AsTuple] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"SamplingParams.min_new_tokens: must be at most max_new_tokens ({self.max_new_tokens}), not "
                f"{self.min_new_tokens}"
            )


def as_sampling(params: Any, base: SamplingParams | None = None) -> SamplingParams:
    """`SamplingParams` as they are; a mapping overrides fields of `base` (None: the defaults), lists become tuples.

    Raises:
        ConfigError: `params` is neither, has an unknown field, or a value is out of range.
    """
    base = base or SamplingParams()
    if params is None or isinstance(params, SamplingParams):
        return params or base
    if not isinstance(params, Mapping):
        raise ConfigError(f"sampling is SamplingParams or a mapping of their fields, not {shown(params)}")
    fields = {str(name): value for name, value in params.items()}
    if unknown := next((name for name in fields if name not in SamplingParams.__dataclass_fields__), None):
        raise ConfigError(f"there is no sampling setting '{unknown}': {nearest(unknown, base.__dataclass_fields__)}")
    return replace(base, **fields)


#: A guard's decision on a response so far; None: it goes on.
Verdict = Literal["stop", "reject"] | None


class LogitsProcessor(Protocol):
    """Changes what may be sampled next. It belongs to one request, so it may keep state."""

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """Called once for each token of the response, in order.

        Args:
            tokens: the response so far; must not be changed.
            logits: `[V]`, fp32 or fp64, before temperature; may be changed in place.

        Returns:
            The logits `[V]` to sample from, minus infinity for excluded tokens (NaN and plus infinity are refused). If
            every token is excluded, the response ends with `finish="reject"`. Log-probs are of the unchanged
            logits.
        """


class Guard(Protocol):
    """Checks the text of responses while they are generated; requests that share a guard are checked in one call.

    Attributes:
        every: tokens between two checks of a response; it is also checked when it ends.
    """

    every: int

    def __call__(self, texts: Sequence[str]) -> Sequence[Verdict]:
        """A verdict per text: "stop" ends the response as it is, "reject" ends it with `finish="reject"`."""


@dataclass(frozen=True, slots=True)
class Request:
    """One response to be sampled. `id` names the sample and, with the run's seed, determines its random numbers.

    Requests with equal `prompt_tokens` share one prefill and one copy of the prompt's KV cache. `processors` change the
    logits, one after the other. A `grammar` allows only tokens that conform to it: `finish="stop"` then means that the
    grammar is complete, and a response that a stop string or a guard ends earlier has `finish="length"`. A grammar and
    a `guard` need an engine with a tokenizer. `on_token` is called with each token, in the thread that steps the
    engine, by the engines embedded and hf; others tell no tokens before the sample. A request that `is_turn` of an
    episode may be continued: later prompts begin with its prompt and response, so an engine may keep their keys and
    values. With each token come the log-probs of the `top_log_probs` likeliest ones, by engines that `tells_top`;
    others refuse it.

    Raises:
        RolloutError: the prompt is not a sequence of whole numbers.
    """

    id: str
    prompt_tokens: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    processors: tuple[LogitsProcessor, ...] = ()
    guard: Guard | None = None
    grammar: Grammar | None = None
    on_token: Callable[[int], None] | None = None
    is_turn: bool = False
    top_log_probs: int = 0

    def __post_init__(self) -> None:
        try:
            tokens = list(map(operator.index, self.prompt_tokens))
        except TypeError as error:
            text = f"request '{self.id}': its prompt must be token ids, got {shown(self.prompt_tokens)}"
            raise RolloutError(text) from error
        object.__setattr__(self, "prompt_tokens", tokens)


def check_new(request: Request, unfinished: Container[str]) -> None:
    """Raises RolloutError if one of these ids is the request's."""
    if request.id in unfinished:
        raise RolloutError(f"request '{request.id}' is already being answered: ids must differ")


@dataclass(slots=True)
class Sample:
    """A finished response.

    `tokens` include the end-of-sequence token, stop token or stop string that ended it; `log_probs` are aligned with
    them. `policy_version`: of the weights that sampled the first token. `text` is set for requests with stop
    strings or a guard: the response as rewards read it, up to the stop string that ended it. `temperature`: of the
    request, for episodes. `top_log_probs` are, at each token, those that the request asked for: tokens of the same
    distribution and their log-probs, the likeliest first.
    """

    id: str
    tokens: list[int]
    log_probs: list[float]
    finish: Finish
    policy_version: int
    text: str | None = None
    temperature: float | None = None
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)


class RolloutEngine(Protocol):
    """Generates samples. Not thread-safe: one thread adds and steps.

    An engine whose log-probs equal the trainer's has an attribute `exact = True`; for any other engine the trainer
    computes its own, measures the mismatch and corrects for it. One that computes with the very model that it was made
    with has `is_live = True`: it gets that model's own tensors as shards, and the model has its weights from `wake` to
    `sleep`. Any other gets the weights of a plain model, with adapters merged into them. It may drop them in its
    sleep: then it has `lacks_weights = True`, and takes no requests until `load_shards`. One with `tells_top = True`
    gives log-probs of other tokens than the sampled ones (`Request.top_log_probs`).
    """

    policy_version: int

    @property
    def unfinished(self) -> int:
        """The number of requests that were added and not yet returned as samples."""

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            LongPromptError: its prompt leaves no room for a response.
            RolloutError: it is invalid for another reason (empty prompt, unknown token, id in use).
        """

    def step(self) -> list[Sample]:
        """Do a bounded amount of work and return the samples that finished."""

    def abort(self, ids: Iterable[str]) -> None:
        """End these requests: the next `step` returns what they have, with `finish="abort"`."""

    def load_shards(self, shards: Iterable[Shard], version: int) -> None:
        """Take new weights and drop what was cached under the old ones."""

    def sleep(self) -> None:
        """Free the memory of the KV cache; unfinished requests are kept."""

    def wake(self) -> None:
        """Be ready again after `sleep`."""


def generate(engine: RolloutEngine, requests: Iterable[Request]) -> Generator[Sample, None, None]:
    """Samples of these requests and of earlier ones, in the order in which they finish.

    If it is closed early or fails, unfinished requests are aborted.
    """
    asked: list[str] = []
    try:
        for request in requests:
            engine.add(request)
            asked.append(request.id)
        while engine.unfinished:
            yield from engine.step()
    finally:
        if asked and engine.unfinished:
            engine.abort(asked)
            engine.step()  # returns them, so that no later caller gets them
