"""Anthropic's `/v1/messages` (docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from verl.rollout.gateway.dialects import form
from verl.rollout.gateway.dialects.form import Body, ChatAnswer, ChatRequest, Dialect, Part, Reply, RequestError
from verl.rollout.gateway.messages import Message, ToolCall

_READ = frozenset((
    "model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream", "output_config",
))  # fmt: skip
_DEFAULTS: form.Defaults = {
    "thinking": ({"type": "disabled"},),
    "metadata": ({},),
    "service_tier": ("auto", "standard_only"),
    "betas": ([],),
    "mcp_servers": ([],),
}
_REFUSED = {"mcp_servers": "give tools, which the agent runs", "container": "give tools, which the agent runs"}
_TEXT = {"text": "text"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def read(body: Body) -> ChatRequest:
    form.check_fields(body, _READ, _DEFAULTS, _REFUSED)
    tools, strict = form.tools_of(body, [None, "custom"], parameters="input_schema")
    return ChatRequest(
        form.typed(body, "model", str, ""),
        tuple(_conversation(body)),
        tools,
        strict,
        form.chosen(_choice(form.typed(body, "tool_choice", dict, {})), tools),
        _schema(form.typed(body, "output_config", dict, {})),
        form.limit_of(body, "max_tokens"),
        form.stop_strings(body.get("stop_sequences"), "stop_sequences"),
        stream=form.typed(body, "stream", bool, False),
        sampling=form.sampling_of(body),
    )


def _choice(choice: Body) -> str:
    if choice.get("disable_parallel_tool_use"):
        raise RequestError(400, "'disable_parallel_tool_use' is not supported here: leave it out", "tool_choice")
    kind = choice.get("type", "auto")
    return str(choice.get("name", "")) if kind == "tool" else _CHOICES.get(kind, str(kind))


def _schema(config: Body) -> Body | None:
    if unknown := [name for name, value in config.items() if name != "format" and value is not None]:
        raise RequestError(400, f"'output_config.{unknown[0]}' is not supported here: leave it out", "output_config")
    wanted = form.typed(config, "format", dict, {})
    return form.typed(wanted, "schema", dict, {}) if wanted else None


def _conversation(body: Body) -> Iterator[Message]:
    if system := form.joined(body.get("system"), "system", _TEXT):
        yield Message("system", system)
    turns = form.mappings(body.get("messages"), "messages")
    if not turns or turns[-1].get("role") != "user":
        raise RequestError(400, "the conversation must end with a user message: replies are not begun", "messages")
    for index, turn in enumerate(turns):
        where, content = f"messages[{index}].content", turn.get("content")
        blocks = form.mappings([{"type": "text", "text": content}] if isinstance(content, str) else content, where)
        if turn.get("role") == "assistant":
            yield _assistant(blocks, where)
        elif turn.get("role") == "user":
            yield from _user(blocks, where)
        else:
            raise RequestError(400, f"messages[{index}].role is user or assistant", "messages")


def _assistant(blocks: list[Body], where: str) -> Message:
    calls = []
    for call in (block for block in blocks if block.get("type") == "tool_use"):
        name, id = form.typed(call, "name", str, ""), form.typed(call, "id", str, "")
        calls.append(ToolCall(name, json.dumps(call.get("input") or {}), id))
    thoughts = [form.typed(block, "thinking", str, "") for block in blocks if block.get("type") == "thinking"]
    others = {"tool_use": "", "thinking": "", "redacted_thinking": ""}
    return Message("assistant", form.joined(blocks, where, {**_TEXT, **others}), tuple(calls), "\n".join(thoughts))


def _user(blocks: list[Body], where: str) -> Iterator[Message]:
    """One message for each result of a tool, and one for the text between."""
    text: list[Body] = []
    for block in [*blocks, None]:
        if block is not None and block.get("type") != "tool_result":
            text.append(block)
            continue
        if text:
            yield Message("user", form.joined(text, where, _TEXT))
        text = []
        if block is not None:
            result = form.joined(block.get("content"), f"{where}.content", _TEXT)
            yield Message("tool", result, call_id=form.typed(block, "tool_use_id", str, ""))


def answer(request: ChatRequest, result: ChatAnswer) -> Body:
    reply = result.replies[0]
    usage = {**_prompt(result), "output_tokens": result.usage.sampled}
    return {**_head(result), "content": list(_blocks(reply)), **_end(reply), "usage": usage}


def _head(result: ChatAnswer) -> dict[str, Any]:
    name = f"msg_{result.replies[0].id}"
    return {"id": name, "type": "message", "role": "assistant", "model": result.model}


def _end(reply: Reply) -> dict[str, Any]:
    reason = "stop_sequence" if reply.stopped_by else _FINISH[reply.finish]
    return {"stop_reason": reason, "stop_sequence": reply.stopped_by}


def _prompt(result: ChatAnswer) -> dict[str, int]:
    """Anthropic counts the tokens of the prompt apart from those that an earlier call had."""
    usage = result.usage
    new = usage.prompt - usage.cached
    return {"input_tokens": new, "cache_read_input_tokens": usage.cached, "cache_creation_input_tokens": 0}


def _blocks(reply: Reply) -> Iterator[dict[str, Any]]:
    message = reply.message
    if message.reasoning:
        yield {"type": "thinking", "thinking": message.reasoning, "signature": reply.id}
    if message.content or not (message.calls or message.reasoning):
        yield {"type": "text", "text": message.content}
    for call in message.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}


class AnthropicEvents:
    """See `Events`. One block at a time is open."""

    def __init__(self, request: ChatRequest) -> None:
        self._id, self._kind, self._index = "", "", -1

    def begin(self, answer: ChatAnswer) -> Iterator[str]:
        self._id = answer.replies[0].id
        unfinished: Body = {"content": [], "stop_reason": None, "stop_sequence": None}
        start = {**_head(answer), **unfinished, "usage": {**_prompt(answer), "output_tokens": 0}}
        yield _typed("message_start", message=start)

    def part(self, part: Part) -> Iterator[str]:
        for kind, text in (("thinking", part.reasoning), ("text", part.content)):
            if text:
                yield from self._enter(kind)
                yield self._delta(f"{kind}_delta", **{kind: text})

    def end(self, answer: ChatAnswer) -> Iterator[str]:
        reply = answer.replies[0]
        yield from self._leave()
        for block in list(_blocks(reply))[self._index + 1 :]:
            yield from self._enter(block["type"], block)
            if block["type"] == "tool_use":
                for part in form.chunks(json.dumps(block["input"], ensure_ascii=False)):
                    yield self._delta("input_json_delta", partial_json=part)
            yield from self._leave()
        yield _typed("message_delta", delta=_end(reply), usage={"output_tokens": answer.usage.sampled})
        yield _typed("message_stop")

    def _enter(self, kind: str, block: Body | None = None) -> Iterator[str]:
        if kind != self._kind:
            yield from self._leave()
            self._kind, self._index = kind, self._index + 1
            empty: dict[str, Body] = {
                "tool_use": {"input": {}},
                "thinking": {"thinking": "", "signature": ""},
                "text": {"text": ""},
            }
            begun = {"type": kind, **(block or {}), **empty[kind]}
            yield _typed("content_block_start", index=self._index, content_block=begun)

    def _leave(self) -> Iterator[str]:
        if self._kind == "thinking":
            yield self._delta("signature_delta", signature=self._id)
        if self._kind:
            yield _typed("content_block_stop", index=self._index)
        self._kind = ""

    def _delta(self, name: str, **data: Any) -> str:
        return _typed("content_block_delta", index=self._index, delta={"type": name, **data})


def _typed(name: str, **data: Any) -> str:
    return form.event({"type": name, **data}, name)


def error(fault: RequestError) -> Body:
    kind = _KINDS.get(fault.status, "api_error" if fault.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(fault)}}


ANTHROPIC = Dialect(read, answer, AnthropicEvents, error, lambda fault: form.event(error(fault), "error"))
