"""OpenAI's `/v1/chat/completions` (platform.openai.com/docs/api-reference/chat), with the `reasoning_content` of
servers of open models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl.rollout.gateway.dialects import form
from verl.rollout.gateway.dialects.form import Body, ChatAnswer, ChatRequest, Dialect, Part, Reply, RequestError, Usage
from verl.rollout.gateway.messages import Message, ToolCall
from verl.rollout.gateway.replies import THOUGHTS

_READ = frozenset((
    "model", "messages", "tools", "tool_choice", "response_format", "max_tokens", "max_completion_tokens", "stop", "n",
    "logprobs", "top_logprobs", "stream", "stream_options",
))  # fmt: skip
_DEFAULTS: form.Defaults = {
    "parallel_tool_calls": (True,),
    "store": (False,),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "metadata": ({},),
}
_REFUSED = {
    "store": "nothing is stored",
    "functions": "send them as tools",
    "function_call": "send tool_choice",
    "audio": "models of text are trained here",
    "modalities": "models of text are trained here",
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_PARTS = {"text": "text", "refusal": "refusal"}


def read(body: Body) -> ChatRequest:
    form.check_fields(body, _READ, _DEFAULTS, _REFUSED)
    tools, strict = form.tools_of(body, ["function"], inside="function")
    options = form.typed(body, "stream_options", dict, {})
    n = form.typed(body, "n", int, 1)
    if n < 1:
        raise RequestError(400, "'n' must be at least 1", "n", "invalid_value")
    log_probs, top = form.typed(body, "logprobs", bool, False), form.top_log_probs(body)
    if top and not log_probs:
        raise RequestError(400, "'top_logprobs' needs logprobs: true", "top_logprobs", "invalid_value")
    return ChatRequest(
        form.typed(body, "model", str, ""),
        conversation(form.mappings(body.get("messages"), "messages")),
        tools,
        strict,
        form.chosen(_choice(body.get("tool_choice")), tools),
        _schema(form.typed(body, "response_format", dict, {})),
        form.limit_of(body, "max_tokens", "max_completion_tokens"),
        form.stop_strings(body.get("stop"), "stop"),
        n,
        log_probs,
        form.typed(body, "stream", bool, False),
        bool(options.get("include_usage")),
        form.sampling_of(body),
        top,
    )


def conversation(messages: list[Body]) -> tuple[Message, ...]:
    """Raises RequestError for a message that is none."""
    if not messages:
        raise RequestError(400, "'messages' is empty", "messages", "invalid_value")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def _message(message: Body, where: str) -> Message:
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        known = ", ".join(_ROLES)
        raise RequestError(400, f"'{where}.role' is one of {known}, not {message.get('role')!r:.40}", where)
    called, content = message.get("tool_calls") or (), message.get("content")
    calls = tuple(_call(call, where) for call in form.mappings(called, f"{where}.tool_calls")) if called else ()
    thought = next((message[name] for name in THOUGHTS if isinstance(message.get(name), str)), "")
    content = content if isinstance(content, str) else form.joined(content, f"{where}.content", _PARTS)
    return Message(role, content, calls, thought, form.typed(message, "tool_call_id", str, ""))


def _call(call: Body, where: str) -> ToolCall:
    function = form.typed(call, "function", dict, {})
    if not isinstance(function.get("name"), str):
        raise RequestError(400, f"'{where}' has a call without a function's name", where, "invalid_value")
    return ToolCall(function["name"], form.typed(function, "arguments", str, "{}"), form.typed(call, "id", str, ""))


def _choice(value: Any) -> str:
    if isinstance(value, dict):
        return str(form.typed(value, "function", dict, {}).get("name", ""))
    return "auto" if value is None else str(value)


def _schema(wanted: Body) -> Body | None:
    if wanted.get("type", "text") == "text":
        return None
    if wanted["type"] == "json_object":
        return {"type": "object"}
    schema = form.typed(wanted, "json_schema", dict, {}).get("schema")
    if wanted["type"] != "json_schema" or not isinstance(schema, dict):
        raise RequestError(400, f"'response_format' is no JSON schema: {wanted!r:.80}", "response_format")
    return schema


def answer(request: ChatRequest, result: ChatAnswer) -> Body:
    choices = [
        {"index": index, "message": _said(reply), "logprobs": _log_probs(request, reply), "finish_reason": reply.finish}
        for index, reply in enumerate(result.replies)
    ]
    return {**_head(result, "chat.completion"), "choices": choices, "usage": _usage(result.usage)}


def _head(result: ChatAnswer, kind: str) -> dict[str, Any]:
    name = f"chatcmpl-{result.replies[0].id}"
    return {"id": name, "object": kind, "created": result.created, "model": result.model}


def _said(reply: Reply) -> dict[str, Any]:
    message, calls = reply.message, [_written(call) for call in reply.message.calls]
    said = {"role": "assistant", "content": message.content or (None if calls else ""), "refusal": None}
    thought = {"reasoning_content": message.reasoning} if message.reasoning else {}
    return {**said, **thought, **({"tool_calls": calls} if calls else {})}


def _written(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _log_probs(request: ChatRequest, reply: Reply) -> Body | None:
    if not request.log_probs:
        return None
    return {"content": form.shown_tokens(reply.tokens), "refusal": None}


def _usage(usage: Usage) -> Body:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.sampled,
        "total_tokens": usage.prompt + usage.sampled,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


class ChatEvents:
    """See `Events`."""

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._head: dict[str, Any] = {}

    def begin(self, answer: ChatAnswer) -> Iterator[str]:
        usage = {"usage": None} if self._request.stream_usage else {}
        self._head = {**_head(answer, "chat.completion.chunk"), **usage}
        for index in range(len(answer.replies)):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def part(self, part: Part) -> Iterator[str]:
        if part.reasoning:
            yield self._chunk(part.index, {"reasoning_content": part.reasoning})
        if part.content:
            yield self._chunk(part.index, {"content": part.content})

    def end(self, answer: ChatAnswer) -> Iterator[str]:
        for index, reply in enumerate(answer.replies):
            for delta in _call_deltas(reply):
                yield self._chunk(index, delta)
            # With the log-probs of all tokens: which of them a text is of is known at its end.
            yield self._chunk(index, {}, reply.finish, _log_probs(self._request, reply))
        if self._request.stream_usage:
            yield form.event({**self._head, "choices": [], "usage": _usage(answer.usage)})
        yield form.event("[DONE]")

    def _chunk(self, index: int, delta: Body, finish: str | None = None, log_probs: Body | None = None) -> str:
        choice = {"index": index, "delta": delta, "logprobs": log_probs, "finish_reason": finish}
        return form.event({**self._head, "choices": [choice]})


def _call_deltas(reply: Reply) -> Iterator[Body]:
    for index, call in enumerate(reply.message.calls):
        begun = _written(call)
        yield {"tool_calls": [{"index": index, **begun, "function": {**begun["function"], "arguments": ""}}]}
        for text in form.chunks(call.arguments):
            yield {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def error(fault: RequestError) -> Body:
    """As https://platform.openai.com/docs/guides/error-codes has it; of the responses, too."""
    kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}.get(fault.status)
    kind = kind or ("server_error" if fault.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(fault), "type": kind, "param": fault.param, "code": fault.code}}


CHAT = Dialect(read, answer, ChatEvents, error, lambda fault: form.event(error(fault)))
