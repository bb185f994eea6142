"""Anthropic's `/v1/messages` (docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any, ClassVar

from verl.rollout.gateway.dialects import base
from verl.rollout.gateway.dialects.base import Body, ChatAnswer, ChatRequest, Reply, RequestError
from verl.rollout.gateway.messages import Message, ToolCall

_TEXT = {"text": "text"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
#: The content of a block that has just begun.
_EMPTY: dict[str, Body] = {
    "tool_use": {"input": {}},
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
}


class AnthropicEvents(base.ItemEvents):
    """See `Events`. Items are called blocks."""

    kinds = ("thinking", "text")

    def begin(self, answer: ChatAnswer) -> Iterator[str]:
        self.id = answer.replies[0].id
        unfinished: Body = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**ANTHROPIC.answer(self.request, answer), **unfinished}
        yield base.event({"type": "message_start", "message": message})

    def end(self, answer: ChatAnswer) -> Iterator[str]:
        whole = ANTHROPIC.answer(self.request, answer)
        yield from self.leave()
        for block in whole["content"][self.index + 1 :]:
            yield from self.enter(block["type"], block)
            if block["type"] == "tool_use":
                for part in base.chunks(json.dumps(block["input"], ensure_ascii=False)):
                    yield self._delta("input_json_delta", partial_json=part)
            yield from self.leave()
        end = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield base.event({"type": "message_delta", "delta": end, "usage": {"output_tokens": answer.sampled}})
        yield base.event({"type": "message_stop"})

    def opened(self, item: Body) -> Iterator[str]:
        begun = {"type": self.kind, **item, **_EMPTY[self.kind]}
        yield base.event({"type": "content_block_start", "index": self.index, "content_block": begun})

    def delta(self, text: str) -> str:
        return self._delta(f"{self.kind}_delta", **{self.kind: text})

    def closed(self) -> Iterator[str]:
        if self.kind == "thinking":
            yield self._delta("signature_delta", signature=self.id)
        yield base.event({"type": "content_block_stop", "index": self.index})

    def _delta(self, kind: str, **data: Any) -> str:
        return base.event({"type": "content_block_delta", "index": self.index, "delta": {"type": kind, **data}})


class Anthropic(base.Dialect):
    fields = frozenset((
        "model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream",
        "output_config",
    ))  # fmt: skip
    defaults: ClassVar = {
        "thinking": ({"type": "disabled"},),
        "metadata": ({},),
        "service_tier": ("auto", "standard_only"),
        "betas": ([],),
        "mcp_servers": ([],),
    }
    refused: ClassVar = {
        "mcp_servers": "give tools, which the agent runs",
        "container": "give tools, which the agent runs",
    }
    stop = "stop_sequences"
    tool_types = (None, "custom")
    tool_schema = "input_schema"
    events = AnthropicEvents

    def choice(self, body: Body) -> str:
        choice = base.typed(body, "tool_choice", dict, {})
        if choice.get("disable_parallel_tool_use"):
            raise RequestError(400, "'disable_parallel_tool_use' is not supported here: leave it out", "tool_choice")
        kind = choice.get("type", "auto")
        return str(choice.get("name", "")) if kind == "tool" else _CHOICES.get(kind, str(kind))

    def schema(self, body: Body) -> Body | None:
        config = base.typed(body, "output_config", dict, {})
        if unknown := [name for name, value in config.items() if name != "format" and value is not None]:
            refusal = f"'output_config.{unknown[0]}' is not supported here: leave it out"
            raise RequestError(400, refusal, "output_config")
        wanted = base.typed(config, "format", dict, {})
        return base.typed(wanted, "schema", dict, {}) if wanted else None

    def messages(self, body: Body) -> Iterator[Message]:
        if system := base.joined(body.get("system"), "system", _TEXT):
            yield Message("system", system)
        turns = base.listed(body.get("messages"), "messages")
        if not turns or turns[-1].get("role") != "user":
            raise RequestError(400, "the conversation must end with a user message: replies are not begun", "messages")
        for index, turn in enumerate(turns):
            where, content = f"messages[{index}].content", turn.get("content")
            blocks = base.listed([{"type": "text", "text": content}] if isinstance(content, str) else content, where)
            if turn.get("role") == "assistant":
                yield _assistant(blocks, where)
            elif turn.get("role") == "user":
                yield from _user(blocks, where)
            else:
                raise RequestError(400, f"messages[{index}].role is user or assistant", "messages")

    def answer(self, request: ChatRequest, answer: ChatAnswer) -> Body:
        reply = answer.replies[0]
        head = {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": request.model}
        reason = "stop_sequence" if reply.stopped_by else _FINISH[reply.finish]
        end = {"stop_reason": reason, "stop_sequence": reply.stopped_by}
        # Anthropic counts the prompt's cached tokens apart from the others.
        cached = {"cache_read_input_tokens": answer.cached, "cache_creation_input_tokens": 0}
        tokens = {"input_tokens": answer.prompt - answer.cached, **cached, "output_tokens": answer.sampled}
        return {**head, "content": list(_blocks(reply)), **end, "usage": tokens}

    def error(self, fault: RequestError) -> Body:
        kind = _ERRORS.get(fault.status, "api_error" if fault.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(fault)}}


def _assistant(blocks: list[Body], where: str) -> Message:
    calls = []
    for call in (block for block in blocks if block.get("type") == "tool_use"):
        name, id = base.typed(call, "name", str, ""), base.typed(call, "id", str, "")
        calls.append(ToolCall(name, json.dumps(call.get("input") or {}), id))
    thoughts = [base.typed(block, "thinking", str, "") for block in blocks if block.get("type") == "thinking"]
    others = {"tool_use": "", "thinking": "", "redacted_thinking": ""}
    return Message("assistant", base.joined(blocks, where, {**_TEXT, **others}), tuple(calls), "\n".join(thoughts))


def _user(blocks: list[Body], where: str) -> Iterator[Message]:
    """One message for each result of a tool, and one for the text between."""
    for is_result, group in groupby(blocks, lambda block: block.get("type") == "tool_result"):
        if not is_result:
            yield Message("user", base.joined([*group], where, _TEXT))
            continue
        for block in group:
            result = base.joined(block.get("content"), f"{where}.content", _TEXT)
            yield Message("tool", result, call_id=base.typed(block, "tool_use_id", str, ""))


def _blocks(reply: Reply) -> Iterator[dict[str, Any]]:
    message = reply.message
    if message.reasoning:
        yield {"type": "thinking", "thinking": message.reasoning, "signature": reply.id}
    if message.content or not (message.calls or message.reasoning):
        yield {"type": "text", "text": message.content}
    for call in message.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}


ANTHROPIC = Anthropic()
