"""OpenAI's `/v1/responses` (platform.openai.com/docs/api-reference/responses), of which nothing is stored."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from verl.rollout.gateway.dialects import base
from verl.rollout.gateway.dialects.base import Body, ChatAnswer, ChatRequest, RequestError
from verl.rollout.gateway.messages import Message, ToolCall

#: What `include` may ask for.
_LOG_PROBS = "message.output_text.logprobs"
_WHOLE = "nothing is stored: send the whole conversation as input"
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_THOUGHTS = {"reasoning_text": "text", "summary_text": "text"}
#: What events call the text of an item.
_EVENTS = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}


class ResponsesEvents(base.ItemEvents):
    """See `Events`."""

    kinds = ("reasoning", "message")

    def __init__(self, request: ChatRequest) -> None:
        super().__init__(request)
        self._numbers = itertools.count()
        self._item: Body = {}
        self._log_probs: list[Body] = []  # of all tokens, known at the end

    def begin(self, answer: ChatAnswer) -> Iterator[str]:
        self.id = answer.replies[0].id
        head = _head(self.request, answer)
        yield self._event("created", response=head)
        yield self._event("in_progress", response=head)

    def end(self, answer: ChatAnswer) -> Iterator[str]:
        whole, self._log_probs = RESPONSES.answer(self.request, answer), base.shown_tokens(answer.replies[0].tokens)
        yield from self.leave()
        for item in whole["output"][self.index + 1 :]:
            yield from self.enter(item["type"], item)
            for text in base.chunks(item.get("arguments", "")):
                yield self.delta(text)
            yield from self.leave()
        yield self._event(whole["status"], response=whole)

    def opened(self, item: Body) -> Iterator[str]:
        is_call = self.kind == "function_call"
        self._item = item if is_call else _text_item(self.kind, self.id, "")
        empty: Body = {"arguments": "", "status": "in_progress"} if is_call else {"content": []}
        yield self._event("output_item.added", output_index=self.index, item={**self._item, **empty})
        if not is_call:
            yield self._at("content_part.added", part=self._item["content"][0])

    def delta(self, text: str) -> str:
        more: Body = {"logprobs": []} if self.kind == "message" else {}
        return self._at(f"{_EVENTS[self.kind]}.delta", delta=text, **more)

    def closed(self) -> Iterator[str]:
        item, name = self._item, f"{_EVENTS[self.kind]}.done"
        if self.kind == "function_call":
            yield self._at(name, name=item["name"], arguments=item["arguments"])
        else:
            item = _text_item(self.kind, self.id, self.text, self._log_probs)
            more: Body = {"logprobs": self._log_probs} if self.kind == "message" else {}
            yield self._at(name, text=self.text, **more)
            yield self._at("content_part.done", part=item["content"][0])
        yield self._event("output_item.done", output_index=self.index, item=item)

    def _at(self, event: str, /, **data: Any) -> str:
        """An event of the open item."""
        where = {"output_index": self.index, "item_id": self._item["id"]}
        return self._event(event, **where, **({"content_index": 0} if self.kind != "function_call" else {}), **data)

    def _event(self, event: str, /, **data: Any) -> str:
        return base.event({"type": f"response.{event}", "sequence_number": next(self._numbers), **data})


class Responses(base.Dialect):
    fields = frozenset((
        "model", "input", "instructions", "tools", "tool_choice", "text", "max_output_tokens", "stream", "top_logprobs",
    ))  # fmt: skip
    defaults: ClassVar = {
        "parallel_tool_calls": (True,),
        "store": (False,),
        "background": (False,),
        "include": ([], [_LOG_PROBS]),
        "truncation": ("disabled",),
        "service_tier": ("auto", "default"),
        "metadata": ({},),
        "stream_options": ({}, {"include_obfuscation": False}),
    }
    refused: ClassVar = {
        "previous_response_id": _WHOLE,
        "conversation": _WHOLE,
        "prompt": _WHOLE,
        "store": "nothing is stored: send false",
        "background": "wait for the answer, or stream it",
    }
    limits = ("max_output_tokens",)
    events = ResponsesEvents

    def read(self, body: Body) -> ChatRequest:
        request = super().read(body)
        return replace(request, log_probs=request.top_log_probs > 0 or bool(body.get("include")))

    def schema(self, body: Body) -> Body | None:
        wanted = base.typed(base.typed(body, "text", dict, {}), "format", dict, {})
        return base.schema_of(wanted, wanted.get("schema"), "text.format")

    def messages(self, body: Body) -> list[Message]:
        value = body.get("input")
        items = [{"role": "user", "content": value}] if isinstance(value, str) else base.listed(value, "input")
        start = base.typed(body, "instructions", str, "")
        messages = [Message("system", start)] if start else []
        is_open = False  # whether items may still be of the assistant's last message
        for index, item in enumerate(items):
            message = _read_item(item, f"input[{index}]")
            if is_open and message.role == "assistant":
                before = messages[-1]
                # A message is a thought, then a text, then calls.
                if not ((message.content or message.reasoning) and (before.content or before.calls)):
                    content, reasoning = before.content + message.content, before.reasoning + message.reasoning
                    message = Message("assistant", content, before.calls + message.calls, reasoning)
                    messages.pop()
            messages.append(message)
            is_open = message.role == "assistant"
        if not messages:
            raise base.invalid("input", "'input' is empty")
        return messages

    def answer(self, request: ChatRequest, answer: ChatAnswer) -> Body:
        reply = answer.replies[0]
        is_cut = reply.finish == "length"
        tokens = {
            "input_tokens": answer.prompt,
            "input_tokens_details": {"cached_tokens": answer.cached, "cache_write_tokens": 0},
            "output_tokens": answer.sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt + answer.sampled,
        }
        message, items = reply.message, list[Body]()
        if message.reasoning:
            items.append(_text_item("reasoning", reply.id, message.reasoning))
        if message.content or not (message.calls or message.reasoning):
            items.append(_text_item("message", reply.id, message.content, base.shown_tokens(reply.tokens)))
        for call in message.calls:
            named = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "name": call.name}
            items.append({**named, "arguments": call.arguments, "status": "completed"})
        return {
            **_head(request, answer),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": items,
            "usage": tokens,
        }

    def failure(self, fault: RequestError) -> str:
        error = {"code": fault.code or "server_error", "message": str(fault), "param": fault.param}
        return base.event({"type": "error", **error, "sequence_number": 0})


def _read_item(item: Body, where: str) -> Message:
    kind = item.get("type") or "message"
    call_id = base.typed(item, "call_id", str, "")
    if kind == "message":
        role = {"developer": "system"}.get(str(item.get("role")), str(item.get("role")))
        if role not in ("system", "user", "assistant"):
            raise base.invalid(where, f"'{where}.role' is none: {role!r:.40}")
        return Message(role, base.joined(item.get("content"), f"{where}.content", _TEXTS))
    if kind == "function_call":
        call = ToolCall(base.typed(item, "name", str, ""), base.typed(item, "arguments", str, "{}"), call_id)
        return Message("assistant", calls=(call,))
    if kind == "function_call_output":
        return Message("tool", base.joined(item.get("output"), f"{where}.output", _TEXTS), call_id=call_id)
    if kind == "reasoning":
        name = "content" if item.get("content") else "summary"
        return Message("assistant", reasoning=base.joined(item.get(name), f"{where}.{name}", _THOUGHTS))
    raise base.invalid(where, f"'{where}' is of type '{kind}': {_WHOLE}, as messages and calls")


def _head(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
    tools = [{"type": "function", **tool["function"], "strict": False} for tool in request.tools]
    choice: Any = request.choice
    if choice not in ("auto", "none", "required"):
        choice = {"type": "function", "name": choice}
    return {
        "id": f"resp_{answer.replies[0].id}",
        "object": "response",
        "created_at": answer.created,
        "model": request.model,
        "status": "in_progress",
        **dict.fromkeys(("error", "incomplete_details", "instructions", "temperature", "top_p")),
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": choice,
        "tools": tools,
    }


def _text_item(kind: str, id: str, text: str, log_probs: Sequence[Body] = ()) -> dict[str, Any]:
    """A thought or a message, which has the log-probs of all tokens of the reply."""
    if kind == "reasoning":
        return {"type": kind, "id": f"rs_{id}", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}
    said = {"type": "output_text", "text": text, "annotations": [], "logprobs": [*log_probs]}
    return {"type": kind, "id": f"msg_{id}", "role": "assistant", "status": "completed", "content": [said]}


RESPONSES = Responses()
