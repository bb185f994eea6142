"""OpenAI's `/v1/responses` (platform.openai.com/docs/api-reference/responses), of which nothing is stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from verl.rollout.gateway.dialects import form
from verl.rollout.gateway.dialects.chat import error
from verl.rollout.gateway.dialects.form import Body, ChatAnswer, ChatRequest, Defaults, Dialect, Part, RequestError
from verl.rollout.gateway.messages import Message, ToolCall

_READ = frozenset((
    "model", "input", "instructions", "tools", "tool_choice", "text", "max_output_tokens", "stream", "top_logprobs",
))  # fmt: skip
#: What `include` may ask for.
_LOG_PROBS = "message.output_text.logprobs"
_DEFAULTS: Defaults = {
    "parallel_tool_calls": (True,),
    "store": (False,),
    "background": (False,),
    "include": ([], [_LOG_PROBS]),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "metadata": ({},),
    "stream_options": ({}, {"include_obfuscation": False}),
}
_WHOLE = "nothing is stored: send the whole conversation as input"
_REFUSED = {
    "previous_response_id": _WHOLE,
    "conversation": _WHOLE,
    "prompt": _WHOLE,
    "store": "nothing is stored: send false",
    "background": "wait for the answer, or stream it",
}
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_THOUGHTS = {"reasoning_text": "text", "summary_text": "text"}


def read(body: Body) -> ChatRequest:
    form.check_fields(body, _READ, _DEFAULTS, _REFUSED)
    tools, strict = form.tools_of(body, ["function"])
    choice, top = body.get("tool_choice") or "auto", form.top_log_probs(body)
    return ChatRequest(
        form.typed(body, "model", str, ""),
        _conversation(body),
        tools,
        strict,
        form.chosen(str(choice.get("name", "")) if isinstance(choice, dict) else str(choice), tools),
        _schema(form.typed(body, "text", dict, {})),
        form.limit_of(body, "max_output_tokens"),
        log_probs=top > 0 or bool(body.get("include")),
        stream=form.typed(body, "stream", bool, False),
        sampling=form.sampling_of(body),
        top_log_probs=top,
    )


def _schema(text: Body) -> Body | None:
    wanted = form.typed(text, "format", dict, {})
    kind = wanted.get("type", "text")
    if kind == "json_schema":
        return form.typed(wanted, "schema", dict, {})
    if kind not in ("text", "json_object"):
        raise RequestError(400, f"'text.format' is of no known type: {kind!r:.40}", "text.format")
    return {"type": "object"} if kind == "json_object" else None


def _conversation(body: Body) -> tuple[Message, ...]:
    value = body.get("input")
    items = [{"role": "user", "content": value}] if isinstance(value, str) else form.mappings(value, "input")
    start = form.typed(body, "instructions", str, "")
    messages = [Message("system", start)] if start else []
    is_open = False  # whether items may still be of the assistant's last message
    for index, item in enumerate(items):
        message = _item(item, f"input[{index}]")
        if is_open and message.role == "assistant" and _fits(messages[-1], message):
            before = messages.pop()
            content, reasoning = before.content + message.content, before.reasoning + message.reasoning
            message = Message("assistant", content, before.calls + message.calls, reasoning)
        messages.append(message)
        is_open = message.role == "assistant"
    if not messages:
        raise RequestError(400, "'input' is empty", "input", "invalid_value")
    return tuple(messages)


def _fits(before: Message, item: Message) -> bool:
    """Whether an item of the assistant continues its message: a thought, then a text, then calls."""
    has_text = bool(before.content or before.calls)
    return not has_text if item.content or item.reasoning else True


def _item(item: Body, where: str) -> Message:
    kind = item.get("type") or "message"
    call_id = form.typed(item, "call_id", str, "")
    if kind == "message":
        role = {"developer": "system"}.get(str(item.get("role")), str(item.get("role")))
        if role not in ("system", "user", "assistant"):
            raise RequestError(400, f"'{where}.role' is none: {role!r:.40}", where, "invalid_value")
        return Message(role, form.joined(item.get("content"), f"{where}.content", _TEXTS))
    if kind == "function_call":
        call = ToolCall(form.typed(item, "name", str, ""), form.typed(item, "arguments", str, "{}"), call_id)
        return Message("assistant", calls=(call,))
    if kind == "function_call_output":
        return Message("tool", form.joined(item.get("output"), f"{where}.output", _TEXTS), call_id=call_id)
    if kind == "reasoning":
        name = "content" if item.get("content") else "summary"
        return Message("assistant", reasoning=form.joined(item.get(name), f"{where}.{name}", _THOUGHTS))
    raise RequestError(400, f"'{where}' is of type '{kind}': {_WHOLE}, as messages and calls", where, "invalid_value")


def answer(request: ChatRequest, result: ChatAnswer) -> Body:
    reply, usage = result.replies[0], result.usage
    is_cut = reply.finish == "length"
    tokens = {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.sampled,
    }
    return {
        **_head(request, result),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _output(result),
        "usage": tokens,
    }


def _head(request: ChatRequest, result: ChatAnswer) -> dict[str, Any]:
    tools = [{"type": "function", **tool["function"], "strict": False} for tool in request.tools]
    choice: Any = request.choice
    if choice not in ("auto", "none", "required"):
        choice = {"type": "function", "name": choice}
    return {
        "id": f"resp_{result.replies[0].id}",
        "object": "response",
        "created_at": result.created,
        "model": result.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": choice,
        "tools": tools,
        "top_p": None,
    }


def _output(result: ChatAnswer) -> list[dict[str, Any]]:
    reply = result.replies[0]
    message, items = reply.message, []
    if message.reasoning:
        items.append(_text_item("reasoning", reply.id, message.reasoning))
    if message.content or not (message.calls or message.reasoning):
        items.append(_text_item("message", reply.id, message.content, form.shown_tokens(reply.tokens)))
    for call in message.calls:
        named = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "name": call.name}
        items.append({**named, "arguments": call.arguments, "status": "completed"})
    return items


def _text_item(kind: str, id: str, text: str, log_probs: Sequence[Body] = ()) -> dict[str, Any]:
    """A thought or a message, which has the log-probs of all tokens of the reply."""
    if kind == "reasoning":
        thought = {"type": "reasoning_text", "text": text}
        return {"type": kind, "id": f"rs_{id}", "summary": [], "content": [thought]}
    said = {"type": "output_text", "text": text, "annotations": [], "logprobs": [*log_probs]}
    return {"type": kind, "id": f"msg_{id}", "role": "assistant", "status": "completed", "content": [said]}


class ResponsesEvents:
    """See `Events`. One item at a time is open."""

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._id = self._kind = self._text = ""
        self._number, self._index = 0, -1
        self._log_probs: list[Body] = []  # known at the end

    def begin(self, answer: ChatAnswer) -> Iterator[str]:
        self._id = answer.replies[0].id
        head = _head(self._request, answer)
        yield self._event("created", response=head)
        yield self._event("in_progress", response=head)

    def part(self, part: Part) -> Iterator[str]:
        for kind, text in (("reasoning", part.reasoning), ("message", part.content)):
            if text:
                yield from self._enter(kind)
                self._text += text
                yield self._text_event("delta", delta=text)

    def end(self, result: ChatAnswer) -> Iterator[str]:
        whole, self._log_probs = answer(self._request, result), form.shown_tokens(result.replies[0].tokens)
        yield from self._leave()
        for item in whole["output"][self._index + 1 :]:
            if item["type"] == "function_call":
                yield from self._call(item)
            else:  # a message without text
                yield from self._enter(item["type"])
                yield from self._leave()
        yield self._event(whole["status"], response=whole)

    def _call(self, item: Body) -> Iterator[str]:
        self._index += 1
        where = {"output_index": self._index, "item_id": item["id"]}
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("output_item.added", output_index=self._index, item=begun)
        for text in form.chunks(item["arguments"]):
            yield self._event("function_call_arguments.delta", **where, delta=text)
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield self._event("function_call_arguments.done", **where, **done)
        yield self._event("output_item.done", output_index=self._index, item=item)

    def _enter(self, kind: str) -> Iterator[str]:
        if kind == self._kind:
            return
        yield from self._leave()
        self._kind, self._text, self._index = kind, "", self._index + 1
        item = _text_item(kind, self._id, "")
        yield self._event("output_item.added", output_index=self._index, item={**item, "content": []})
        yield self._part_event("added", item)

    def _leave(self) -> Iterator[str]:
        if self._kind:
            item = _text_item(self._kind, self._id, self._text, self._log_probs)
            yield self._text_event("done", text=self._text)
            yield self._part_event("done", item)
            yield self._event("output_item.done", output_index=self._index, item=item)
        self._kind = ""

    def _text_event(self, name: str, /, **data: Any) -> str:
        item = _text_item(self._kind, self._id, "")
        more: Body = {"logprobs": self._log_probs} if self._kind == "message" else {}
        where = {"output_index": self._index, "item_id": item["id"], "content_index": 0}
        return self._event(f"{item['content'][0]['type']}.{name}", **where, **data, **more)

    def _part_event(self, name: str, item: Body) -> str:
        where = {"output_index": self._index, "item_id": item["id"], "content_index": 0}
        return self._event(f"content_part.{name}", **where, part=item["content"][0])

    def _event(self, name: str, /, **data: Any) -> str:
        name, number = f"response.{name}", self._number
        self._number += 1
        return form.event({"type": name, "sequence_number": number, **data}, name)


def _failure(fault: RequestError) -> str:
    code = fault.code or "server_error"
    return form.event(
        {"type": "error", "code": code, "message": str(fault), "param": fault.param, "sequence_number": 0}, "error"
    )


RESPONSES = Dialect(read, answer, ResponsesEvents, error, _failure)
