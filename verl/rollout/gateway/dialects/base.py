"""The canonical request and answer, and the shared parts of the dialects: one reader over a table of fields, and one
stream of items."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from verl.rollout.gateway.messages import Message

Body = Mapping[str, Any]
T = TypeVar("T")
#: What a training run decides itself: recorded, and without effect.
SAMPLING = frozenset((
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed",
))  # fmt: skip
#: Most of the likeliest tokens that a request may ask for at each token, as OpenAI has it.
MAX_TOP = 20
#: Cuts a call's arguments into the chunks of a stream.
chunks = re.compile(".{1,64}", re.DOTALL).findall


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
        super().__init__(400, f"prompt is too long: {tokens} tokens > {limit} maximum ({code})", "messages", code)


@dataclass(frozen=True)
class ChatRequest:
    """A request in no dialect.

    Attributes:
        tools: as chat templates take them.
        strict: names of those whose calls must match their schema.
        choice: "auto", "none", "required", or the name of the one tool to call.
        schema: JSON schema of the reply.
        sampling: fields of `SAMPLING` that were set.
        top_log_probs: how many of the likeliest tokens to return for each position.
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
    """A sampled token; `top` are the likeliest at its position."""

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
class ChatAnswer:
    """Replies to one request; `created` is in seconds since 1970. Token counts: of the prompt, of what of it an earlier
    call had, and of the replies."""

    created: int
    replies: tuple[Reply, ...]
    prompt: int = 0
    cached: int = 0
    sampled: int = 0


@dataclass(frozen=True)
class Part:
    """A delta of the reply `index` of a request."""

    index: int
    reasoning: str = ""
    content: str = ""


class Events:
    """The stream of one answer, as server-sent events.

    Attributes:
        begin: before any reply begins: all are empty.
        part: a delta; all of the thought and the text has come this way before the end.
        end: the calls, and how it ended.
    """

    begin: Callable[[ChatAnswer], Iterator[str]]
    part: Callable[[Part], Iterator[str]]
    end: Callable[[ChatAnswer], Iterator[str]]

    def __init__(self, request: ChatRequest) -> None:
        self.request = request


class Dialect:
    """One wire format: what its bodies say, by the table of fields below, and how answers are written in it.

    Attributes:
        fields: those that have an effect; `SAMPLING` is read, too.
        defaults: others, with values that ask for nothing.
        refused: what to do instead of a field that is neither.
        limits: fields that bound the tokens of a reply; the least holds.
        stop: the field with stop strings.
        tool_types: of tools that the agent runs, first the type of one that names none.
        tool_field: holds the rest of a tool, and of a tool choice; "": they hold it themselves.
        tool_schema: the field with a tool's JSON schema.
        messages: the conversation in a body.
        schema: the JSON schema that a reply must match.
        answer: the body of an answer.
        events: the stream of an answer.
    """

    fields: frozenset[str]
    defaults: ClassVar[Mapping[str, Sequence[Any]]]
    refused: ClassVar[Mapping[str, str]]
    limits: ClassVar[tuple[str, ...]] = ("max_tokens",)
    stop = "stop"
    tool_types: ClassVar[Sequence[str | None]] = ("function",)
    tool_field = ""
    tool_schema = "parameters"
    messages: Callable[[Body], Iterable[Message]]
    schema: Callable[[Body], Body | None]
    answer: Callable[[ChatRequest, ChatAnswer], Body]
    events: Callable[[ChatRequest], Events]

    def read(self, body: Body) -> ChatRequest:
        """A body as a request.

        Raises:
            RequestError: a field is malformed, or would be ignored although it asks for something.
        """
        for name, value in body.items():
            if not (name in self.fields or name in SAMPLING or value is None or value in self.defaults.get(name, ())):
                remedy = self.refused.get(name, "leave it out")
                raise RequestError(400, f"'{name}' is not supported here: {remedy}", name, "unsupported_parameter")
        top = typed(body, "top_logprobs", int, 0)
        if not 0 <= top <= MAX_TOP:
            raise invalid("top_logprobs", f"'top_logprobs' is from 0 to {MAX_TOP}, not {top}")
        tools, strict = self._tools(body)
        counts = {name: typed(body, name, int, 1) for name in ("n", *self.limits)}
        if wrong := next((name for name, count in counts.items() if count < 1), None):
            raise invalid(wrong, f"'{wrong}' must be at least 1")
        choice, names = self.choice(body), [tool["function"]["name"] for tool in tools]
        if choice not in ("auto", "none", "required", *names) or (choice == "required" and not names):
            raise invalid("tool_choice", f"'tool_choice': there is no tool to call ({choice})")
        stop = body.get(self.stop) or []
        stop = listed([stop] if isinstance(stop, str) else stop, self.stop, str, "a text or a list of such")
        return ChatRequest(
            typed(body, "model", str, ""),
            tuple(self.messages(body)),
            tools,
            strict,
            choice,
            self.schema(body),
            min((counts[name] for name in self.limits if body.get(name) is not None), default=None),
            tuple(filter(None, stop)),
            counts["n"],
            typed(body, "logprobs", bool, False),
            typed(body, "stream", bool, False),
            bool(typed(body, "stream_options", dict, {}).get("include_usage")),
            {name: body[name] for name in sorted(SAMPLING) if body.get(name) is not None},
            top,
        )

    def _tools(self, body: Body) -> tuple[tuple[Body, ...], frozenset[str]]:
        """The tools as chat templates take them, and the names of the strict ones. Raises RequestError for one without
        a name, and one that the endpoint itself would run."""
        tools, strict = list[Body](), set[str]()
        for tool in listed(body.get("tools") or [], "tools"):
            if (kind := tool.get("type", self.tool_types[0])) not in self.tool_types:
                refusal = f"a tool of type '{kind}' is run by no one here: give functions, which the agent runs"
                raise RequestError(400, refusal, "tools", "unsupported_parameter")
            body = typed(tool, self.tool_field, dict, {}) if self.tool_field else tool
            function = {"name": body.get("name"), "description": str(body.get("description") or "")}
            if not isinstance(function["name"], str) or not function["name"]:
                raise invalid("tools", "a tool has a name")
            schema = body.get(self.tool_schema)
            schema = dict(schema) if isinstance(schema, Mapping) else {"type": "object", "properties": {}}
            tools.append({"type": "function", "function": {**function, "parameters": schema}})
            if body.get("strict"):
                strict.add(function["name"])
        return tuple(tools), frozenset(strict)

    def choice(self, body: Body) -> str:
        choice = body.get("tool_choice") or "auto"
        if isinstance(choice, dict):
            choice = (typed(choice, self.tool_field, dict, {}) if self.tool_field else choice).get("name", "")
        return str(choice)

    def error(self, fault: RequestError) -> Body:
        """As OpenAI's dialects have it (https://platform.openai.com/docs/guides/error-codes)."""
        kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}.get(fault.status)
        kind = kind or ("server_error" if fault.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(fault), "type": kind, "param": fault.param, "code": fault.code}}

    def failure(self, fault: RequestError) -> str:
        """The event of an error after the stream has begun."""
        return event(self.error(fault))


class ItemEvents(Events):
    """A stream of items (thought, text, calls), one open at a time.

    Attributes:
        kinds: the dialect's names for thought and text.
        opened, delta, closed: the events of an item.
    """

    kinds: ClassVar[tuple[str, str]]
    opened: Callable[[Body], Iterator[str]]
    delta: Callable[[str], str]
    closed: Callable[[], Iterator[str]]
    id = kind = text = ""
    index = -1

    def part(self, part: Part) -> Iterator[str]:
        for kind, text in zip(self.kinds, (part.reasoning, part.content), strict=True):
            if text:
                yield from self.enter(kind)
                self.text += text
                yield self.delta(text)

    def enter(self, kind: str, item: Body | None = None) -> Iterator[str]:
        """Open an item, unless it is the open one that goes on."""
        if kind != self.kind:
            yield from self.leave()
            self.kind, self.text, self.index = kind, "", self.index + 1
            yield from self.opened(item or {})

    def leave(self) -> Iterator[str]:
        if self.kind:
            yield from self.closed()
        self.kind = ""


def event(data: Body) -> str:
    """A server-sent event, which has the name of its data's type."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False)}\n\n"


def invalid(param: str, message: str) -> RequestError:
    return RequestError(400, message, param, "invalid_value")


def typed(body: Body, name: str, kind: type[T], default: T) -> T:
    """A field of a type. Raises RequestError if it is of another."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RequestError(400, f"'{name}' is not of the type {kind.__name__}: {value!r:.60}", name, "invalid_type")
    return value


def listed(value: Any, name: str, kind: type[Any] = Mapping, what: str = "a list of objects") -> list[Any]:
    """Raises RequestError unless this is a list of that kind."""
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise RequestError(400, f"'{name}' is {what}, not {value!r:.60}", name, "invalid_type")
    return value


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
    for part in listed(content, name):
        kind = part.get("type", "text")
        if kind not in parts:
            raise invalid(name, f"a part of type '{kind}': models of text are trained here")
        texts.append(typed(part, parts[kind], str, "") if parts[kind] else "")
    return "".join(texts)


def schema_of(wanted: Body, schema: Any, name: str) -> Body | None:
    """The schema that OpenAI's dialects ask for under `name`. Raises RequestError for an unknown format."""
    kind = wanted.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema" or not isinstance(schema, dict):
        raise RequestError(400, f"'{name}' is no JSON schema: {wanted!r:.80}", name)
    return schema


def shown_tokens(tokens: Sequence[Token]) -> list[Body]:
    """Tokens with their log-probs, as OpenAI's dialects have them."""

    def entry(text: str, log_prob: float) -> dict[str, Any]:
        return {"token": text, "bytes": list(text.encode()), "logprob": log_prob}

    return [{**entry(text, p), "top_logprobs": [entry(*other) for other in top]} for text, p, top in tokens]
