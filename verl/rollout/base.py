"""What a rollout engine is: requests in, finished samples out as they finish.

Log-probs are those of the temperature-scaled logits over the whole vocabulary, before top-k, top-p,
min-p and `min_new_tokens` (greedy decoding: at temperature 1): what the trainer computes for the same
tokens. The uniform number behind token t of a sample is a hash of (run seed, sample id, t).
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, Protocol

from verl.errors import ConfigError, RolloutError, nearest
from verl.shard import Shard

if TYPE_CHECKING:
    from torch import Tensor

    from verl.rollout.grammar import Grammar

Finish = Literal["stop", "length", "abort", "reject"]
#: What a guard says of a response so far: None lets it go on.
Verdict = Literal["stop", "reject"] | None


class LongPromptError(RolloutError):
    """A prompt leaves the model no room for a response."""


class LogitsProcessor(Protocol):
    """Changes what may be sampled next, for one request: so it may keep a state of its own."""

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """Called once for each token of the response, in order.

        Args:
            tokens: the response so far; not to be changed.
            logits: `[V]`, fp32 or fp64, before temperature; may be changed in place.

        Returns:
            The logits `[V]` to sample from, minus infinity for what must not come (NaN and plus infinity are
            refused). If nothing may come, the response ends with `finish="reject"`. Log-probs stay those of the
            unchanged logits.
        """


class Guard(Protocol):
    """Looks at the text of responses while they are written. Requests that share a guard are asked for together.

    Attributes:
        every: tokens between two looks at a response; it is looked at when it ends, too.
    """

    every: int

    def __call__(self, texts: Sequence[str]) -> Sequence[Verdict]:
        """A verdict for each text: "stop" ends it as it is, "reject" ends it with `finish="reject"`."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one response is sampled.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off, and apply in this order after the
    temperature. Before `min_new_tokens` tokens no end-of-sequence or stop token is sampled, and no stop string counts.
    `stop` strings and `stop_token_ids` end a response, their tokens included; a string that is how a special token is
    written stands for that token. `ignore_eos` goes on to `max_new_tokens`.

    Raises:
        ConfigError: a value is out of range.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        kinds = {Integral: ("max_new_tokens", "min_new_tokens", "top_k"), Real: ("temperature", "top_p", "min_p")}
        for kind, names in kinds.items():
            for name in names:
                if not isinstance(getattr(self, name), kind):
                    word = "whole number" if kind is Integral else "number"
                    raise ConfigError(f"sampling: {name} must be a {word}, got {getattr(self, name)!r}")
        checks = {
            "max_new_tokens must be at least 0": self.max_new_tokens >= 0,
            "min_new_tokens must lie between 0 and max_new_tokens": 0 <= self.min_new_tokens <= self.max_new_tokens,
            "temperature must be 0 (greedy) or lie in [1e-6, 1e6]": not self.temperature
            or 1e-6 <= self.temperature <= 1e6,
            "top_k must lie in [0, 2^31) (0 is off)": 0 <= self.top_k < 1 << 31,
            "top_p must lie in (0, 1] (1 is off)": 0 < self.top_p <= 1,
            "min_p must lie in [0, 1] (0 is off)": 0 <= self.min_p <= 1,
            "stop must be a tuple of non-empty strings": _is_tuple_of(str, self.stop) and all(self.stop),
            "stop_token_ids must be a tuple of whole numbers": _is_tuple_of(Integral, self.stop_token_ids),
        }
        for message, holds in checks.items():
            if not holds:
                raise ConfigError(f"sampling: {message}, got {self}")


def as_sampling(given: Any, base: SamplingParams | None = None) -> SamplingParams:
    """`given` as it is, or `base` (None: the defaults) with the fields that a mapping names; lists become tuples.

    Raises:
        ConfigError: it is neither, has a field that is unknown, or a value is out of range.
    """
    base = base or SamplingParams()
    if given is None or isinstance(given, SamplingParams):
        return given or base
    if not isinstance(given, Mapping):
        raise ConfigError(f"sampling is SamplingParams or a mapping of their fields, not {given!r}")
    if unknown := next((name for name in given if name not in SamplingParams.__dataclass_fields__), None):
        raise ConfigError(f"there is no sampling setting '{unknown}': {nearest(unknown, base.__dataclass_fields__)}")
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    return replace(base, **fields)


def _is_tuple_of(kind: type, values: object) -> bool:
    return isinstance(values, tuple) and all(isinstance(value, kind) for value in values)


@dataclass(frozen=True, slots=True)
class Request:
    """One response to be sampled. `id` names the sample and, with the run's seed, its random numbers.

    Requests whose `prompt_tokens` are equal share one prefill and one copy of the prompt's KV cache. `processors`
    change the logits, one after the other. A `grammar` allows only tokens that keep to it: `finish="stop"` is then its
    end, and a response that a stop string or a guard ends before it has `finish="length"`, as at the limit. It and a
    `guard` need an engine with a tokenizer.

    Raises:
        RolloutError: the prompt is no sequence of whole numbers.
    """

    id: str
    prompt_tokens: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    processors: tuple[LogitsProcessor, ...] = ()
    guard: Guard | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        try:
            tokens = [operator.index(token) for token in self.prompt_tokens]
        except TypeError as error:
            shown = reprlib.repr(self.prompt_tokens)
            raise RolloutError(f"request '{self.id}': its prompt must be token ids, got {shown}") from error
        object.__setattr__(self, "prompt_tokens", tokens)


@dataclass(slots=True)
class Sample:
    """A finished response.

    `tokens` holds the end-of-sequence token, stop token or stop string that ended it. `log_probs` is aligned
    with `tokens`. `policy_version` is that of the weights which wrote the first token. `text` is set when the
    request has stop strings or a guard: the response up to the stop string that ended it. `temperature` is that of
    the request, noted for episodes.
    """

    id: str
    tokens: list[int]
    log_probs: list[float]
    finish: Finish
    policy_version: int
    text: str | None = None
    temperature: float | None = None


class RolloutEngine(Protocol):
    """Any source of samples. Not thread-safe: one thread adds and steps.

    An engine whose log-probs are the trainer's own numbers says so by an attribute `exact = True`; after any other
    the trainer computes its own, measures the mismatch and corrects for it.
    """

    policy_version: int

    @property
    def unfinished(self) -> int:
        """Requests added that have not come back as samples."""

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            LongPromptError: its prompt leaves no room for a response.
            RolloutError: it can never be answered for another reason (empty prompt, unknown token, id in use).
        """

    def step(self) -> list[Sample]:
        """Do a bounded piece of work; the samples that finished in it."""

    def abort(self, ids: Iterable[str]) -> None:
        """End these requests: they come back from the next `step` with what they have, `finish="abort"`."""

    def load_shards(self, shards: Iterable[Shard], version: int) -> None:
        """Take new weights; what is cached of the old ones is forgotten."""

    def sleep(self) -> None:
        """Give back the memory of the KV cache; unfinished requests are kept."""

    def wake(self) -> None:
        """Be ready again after `sleep`."""


def generate(engine: RolloutEngine, requests: Iterable[Request]) -> Generator[Sample, None, None]:
    """Samples of these requests, and of those before, as they finish, in no particular order.

    Left early, or by an error, it takes back those that have not finished.
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
            engine.step()  # hands them out, so that nobody meets them later
