"""The canonical request and answer, and how the fields of a body are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from verl.rollout.gateway.messages import Message

Body = Mapping[str, Any]
#: Field -> values with which it asks for nothing.
Defaults = Mapping[str, Sequence[Any]]
T = TypeVar("T")
#: What a training run decides itself: recorded, and without effect.
SAMPLING = frozenset((
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed",
))  # fmt: skip
#: Most of the likeliest tokens that a request may ask for at each token, as OpenAI has it.
MAX_TOP = 20
#: How many characters of a call's arguments a chunk of a stream has.
_CHUNK = 64


class RequestError(Exception):
    """A request that is not answered.

    Attributes:
        param: the field that is at fault.
        code: OpenAI's name of the error.
        retry: whether the same request may succeed later.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.retry = status >= 500 or status == 429


class LongRequestError(RequestError):
    """A conversation that leaves the model no room. Clients know it by either of these phrases."""

    def __init__(self, tokens: int, limit: int) -> None:
        code = "context_length_exceeded"
        message = f"prompt is too long: {tokens} tokens > {limit} maximum ({code})"
        super().__init__(400, message, "messages", code)


@dataclass(frozen=True)
class ChatRequest:
    """What a client asks for.

    Attributes:
        tools: as chat templates take them.
        strict: names of those whose calls must match their schema.
        choice: "auto", "none", "required", or the name of the one tool to call.
        schema: JSON schema of the reply.
        sampling: fields of `SAMPLING` that were set.
        top_log_probs: how many of the likeliest tokens are shown beside each.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Body, ...] = ()
    strict: frozenset[str] = frozenset()
    choice: str = "auto"
    schema: Body | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    log_probs: bool = False
    stream: bool = False
    stream_usage: bool = False
    sampling: Body = field(default_factory=dict)
    top_log_probs: int = 0


class Token(NamedTuple):
    """One that was sampled; `top` are the likeliest ones at its place."""

    text: str
    log_prob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Reply:
    """One answer of the policy.

    Attributes:
        id: of its call within the episode.
        finish: "stop", "length" or "tool_calls".
        stopped_by: the stop string that ended it.
    """

    id: str
    message: Message
    finish: Literal["stop", "length", "tool_calls"]
    stopped_by: str | None = None
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens of a request: of the prompt, those of them that an earlier call had, and sampled."""

    prompt: int = 0
    cached: int = 0
    sampled: int = 0


@dataclass(frozen=True)
class ChatAnswer:
    """Replies to one request; `created` is in seconds since 1970."""

    model: str
    created: int
    replies: tuple[Reply, ...]
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True)
class Part:
    """What is new of a reply that is being written.

    Attributes:
        index: of the reply, among those to one request.
    """

    index: int
    reasoning: str = ""
    content: str = ""


class Events(Protocol):
    """The stream of one answer, as text of server-sent events."""

    def begin(self, answer: ChatAnswer) -> Iterator[str]:
        """Before any reply begins: they are empty."""

    def part(self, part: Part) -> Iterator[str]:
        """Thought and text, as they are written; all of them have come so before the end."""

    def end(self, answer: ChatAnswer) -> Iterator[str]:
        """The calls, and how it ended."""


@dataclass(frozen=True)
class Dialect:
    """One form.

    Attributes:
        read: a body as a request; raises RequestError.
        answer: the body of an answer.
        events: makes its stream.
        error: the body of an error.
        failure: an error after a stream has begun.
    """

    read: Callable[[Body], ChatRequest]
    answer: Callable[[ChatRequest, ChatAnswer], Body]
    events: Callable[[ChatRequest], Events]
    error: Callable[[RequestError], Body]
    failure: Callable[[RequestError], str]


def event(data: Body | str, name: str = "") -> str:
    """A server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


def chunks(text: str) -> Iterator[str]:
    """A text in parts of whole characters."""
    for start in range(0, len(text), _CHUNK):
        yield text[start : start + _CHUNK]


def check_fields(body: Body, read: Collection[str], defaults: Defaults, refused: Mapping[str, str]) -> None:
    """Raises RequestError for a field that would be ignored although it asks for something.

    Args:
        read: fields that have an effect.
        refused: others, with what to do instead.
    """
    for name, value in body.items():
        if name in read or name in SAMPLING or value is None or value in defaults.get(name, ()):
            continue
        remedy = refused.get(name, "leave it out")
        raise RequestError(400, f"'{name}' is not supported here: {remedy}", name, "unsupported_parameter")


def typed(body: Body, name: str, kind: type[T], default: T) -> T:
    """A field of a type.

    Raises:
        RequestError: it is of another.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RequestError(400, f"'{name}' is not of the type {kind.__name__}: {value!r:.60}", name, "invalid_type")
    return value


def mappings(value: Any, name: str) -> list[Body]:
    """A list of mappings.

    Raises:
        RequestError: it is none.
    """
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise RequestError(400, f"'{name}' is a list of objects, not {value!r:.60}", name, "invalid_type")
    return value


def limit_of(body: Body, *names: str) -> int | None:
    """The least of the limits of tokens that a body has.

    Raises:
        RequestError: one is below 1.
    """
    limits = [typed(body, name, int, 0) for name in names if body.get(name) is not None]
    if limits and min(limits) < 1:
        raise RequestError(400, f"'{names[0]}' must be at least 1", names[0], "invalid_value")
    return min(limits, default=None)


def joined(content: Any, name: str, parts: Mapping[str, str]) -> str:
    """The text of a content: null, a text, or parts that are joined.

    Args:
        parts: type of a part -> the field that has its text; "" for parts without one.

    Raises:
        RequestError: there is a part of another type, such as an image.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in mappings(content, name):
        kind = part.get("type", "text")
        if kind not in parts:
            raise RequestError(400, f"a part of type '{kind}': models of text are trained here", name, "invalid_value")
        texts.append(typed(part, parts[kind], str, "") if parts[kind] else "")
    return "".join(texts)


def stop_strings(value: Any, name: str) -> tuple[str, ...]:
    """Raises RequestError unless this is a text, a list of such, or nothing."""
    strings = [value] if isinstance(value, str) else (value or [])
    if not isinstance(strings, list) or not all(isinstance(each, str) for each in strings):
        raise RequestError(400, f"'{name}' is a text or a list of such, not {value!r:.60}", name, "invalid_type")
    return tuple(filter(None, strings))


def function_tool(name: Any, description: Any, parameters: Any) -> Body:
    """A tool as chat templates take it."""
    if not isinstance(name, str) or not name:
        raise RequestError(400, "a tool has a name", "tools", "invalid_value")
    schema = dict(parameters) if isinstance(parameters, Mapping) else {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": str(description or ""), "parameters": schema}}


def tools_of(
    body: Body, kinds: Sequence[str | None], inside: str = "", parameters: str = "parameters"
) -> tuple[tuple[Body, ...], frozenset[str]]:
    """The tools of a body as chat templates take them, and the names of those whose calls must match their schema.

    Args:
        kinds: types of tools that the agent runs, first that of one without a type.
        inside: the field that has the rest of a tool; "": the tool itself.
        parameters: the field with its schema.

    Raises:
        RequestError: a tool has no name, or is one that the endpoint itself would run.
    """
    tools, strict = list[Body](), set[str]()
    for tool in mappings(body.get("tools") or [], "tools"):
        if (kind := tool.get("type", kinds[0])) not in kinds:
            refusal = f"a tool of type '{kind}' is run by no one here: give functions, which the agent runs"
            raise RequestError(400, refusal, "tools", "unsupported_parameter")
        function = typed(tool, inside, dict, {}) if inside else tool
        tools.append(function_tool(function.get("name"), function.get("description"), function.get(parameters)))
        if function.get("strict"):
            strict.add(function["name"])
    return tuple(tools), frozenset(strict)


def top_log_probs(body: Body) -> int:
    """Raises RequestError for a number that OpenAI's clients may not send."""
    count = typed(body, "top_logprobs", int, 0)
    if not 0 <= count <= MAX_TOP:
        raise RequestError(400, f"'top_logprobs' is from 0 to {MAX_TOP}, not {count}", "top_logprobs", "invalid_value")
    return count


def shown_tokens(tokens: Sequence[Token]) -> list[Body]:
    """Tokens with their log-probs, as OpenAI's dialects have them."""

    def entry(text: str, log_prob: float) -> dict[str, Any]:
        return {"token": text, "bytes": list(text.encode()), "logprob": log_prob}

    return [{**entry(text, p), "top_logprobs": [entry(*other) for other in top]} for text, p, top in tokens]


def sampling_of(body: Body) -> dict[str, Any]:
    return {name: body[name] for name in sorted(SAMPLING) if body.get(name) is not None}


def chosen(choice: str, tools: Sequence[Body]) -> str:
    """Raises RequestError if a tool must be called that is not there."""
    names = [tool["function"]["name"] for tool in tools]
    if choice not in ("auto", "none", "required", *names) or (choice == "required" and not names):
        raise RequestError(400, f"'tool_choice': there is no tool to call ({choice})", "tool_choice", "invalid_value")
    return choice
