"""OpenAI's `/v1/responses` (platform.openai.com/docs/api-reference/responses), of which nothing is stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from verl.rollout.gateway.dialects.chat import error
from verl.rollout.gateway.dialects.form import (
    Body,
    ChatAnswer,
    ChatRequest,
    Defaults,
    Dialect,
    RequestError,
    check_fields,
    chosen,
    chunks,
    event,
    function_tool,
    hosted,
    joined,
    limit_of,
    mappings,
    sampling_of,
    typed,
)
from verl.rollout.gateway.messages import Message, ToolCall

_READ = frozenset((
    "model", "input", "instructions", "tools", "tool_choice", "text", "max_output_tokens", "stream",
))  # fmt: skip
_DEFAULTS: Defaults = {
    "parallel_tool_calls": (True,),
    "store": (False,),
    "background": (False,),
    "include": ([],),
    "top_logprobs": (0,),
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
    check_fields(body, _READ, _DEFAULTS, _REFUSED)
    tools = tuple(map(_tool, mappings(body.get("tools") or [], "tools")))
    choice = body.get("tool_choice") or "auto"
    return ChatRequest(
        typed(body, "model", str, ""),
        _conversation(body),
        tools,
        frozenset(tool["name"] for tool in body.get("tools") or [] if tool.get("strict")),
        chosen(str(choice.get("name", "")) if isinstance(choice, dict) else str(choice), tools),
        _schema(typed(body, "text", dict, {})),
        limit_of(body, "max_output_tokens"),
        stream=typed(body, "stream", bool, False),
        sampling=sampling_of(body),
    )


def _tool(tool: Body) -> Body:
    if tool.get("type", "function") != "function":
        raise hosted(tool.get("type"))
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _schema(text: Body) -> Body | None:
    form = typed(text, "format", dict, {})
    kind = form.get("type", "text")
    if kind == "json_schema":
        return typed(form, "schema", dict, {})
    if kind not in ("text", "json_object"):
        raise RequestError(400, f"'text.format' is of no known type: {kind!r:.40}", "text.format")
    return {"type": "object"} if kind == "json_object" else None


def _conversation(body: Body) -> tuple[Message, ...]:
    value = body.get("input")
    items = [{"role": "user", "content": value}] if isinstance(value, str) else mappings(value, "input")
    start = typed(body, "instructions", str, "")
    messages = [Message("system", start)] if start else []
    is_open = False  # whether items may still be of the assistant's last message
    for index, item in enumerate(items):
        message = _item(item, f"input[{index}]")
        if is_open and message.role == "assistant" and _fits(messages[-1], message):
            messages[-1] = _merged(messages[-1], message)
        else:
            messages.append(message)
        is_open = message.role == "assistant"
    if not messages:
        raise RequestError(400, "'input' is empty", "input", "invalid_value")
    return tuple(messages)


def _fits(before: Message, item: Message) -> bool:
    """Whether an item of the assistant continues its message: a thought, then a text, then calls."""
    has_text = bool(before.content or before.calls)
    return not has_text if item.content or item.reasoning else True


def _merged(before: Message, item: Message) -> Message:
    return replace(
        before,
        content=before.content + item.content,
        calls=before.calls + item.calls,
        reasoning=before.reasoning + item.reasoning,
    )


def _item(item: Body, where: str) -> Message:
    kind = item.get("type") or "message"
    call_id = typed(item, "call_id", str, "")
    if kind == "message":
        role = {"developer": "system"}.get(str(item.get("role")), str(item.get("role")))
        if role not in ("system", "user", "assistant"):
            raise RequestError(400, f"'{where}.role' is none: {role!r:.40}", where, "invalid_value")
        return Message(role, joined(item.get("content"), f"{where}.content", _TEXTS))
    if kind == "function_call":
        call = ToolCall(typed(item, "name", str, ""), typed(item, "arguments", str, "{}"), call_id)
        return Message("assistant", calls=(call,))
    if kind == "function_call_output":
        return Message("tool", joined(item.get("output"), f"{where}.output", _TEXTS), call_id=call_id)
    if kind == "reasoning":
        name = "content" if item.get("content") else "summary"
        return Message("assistant", reasoning=joined(item.get(name), f"{where}.{name}", _THOUGHTS))
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
        thought = [{"type": "reasoning_text", "text": message.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{reply.id}", "summary": [], "content": thought})
    if message.content or not (message.calls or message.reasoning):
        text = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        said = {"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "status": "completed"}
        items.append({**said, "content": [text]})
    for call in message.calls:
        named = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "name": call.name}
        items.append({**named, "arguments": call.arguments, "status": "completed"})
    return items


def events(request: ChatRequest, result: ChatAnswer) -> Iterator[str]:
    whole, head = answer(request, result), _head(request, result)
    end = "response.incomplete" if whole["status"] == "incomplete" else "response.completed"
    parts: list[tuple[str, Body]] = [
        ("response.created", {"response": head}),
        ("response.in_progress", {"response": head}),
    ]
    for index, item in enumerate(whole["output"]):
        parts += [(name, {"output_index": index, **data}) for name, data in _item_events(item)]
    parts.append((end, {"response": whole}))
    for number, (name, data) in enumerate(parts):
        yield event({"type": name, "sequence_number": number, **data}, name)


def _item_events(item: dict[str, Any]) -> Iterator[tuple[str, Body]]:
    address = {"item_id": item["id"]}
    if item["type"] == "function_call":
        yield "response.output_item.added", {"item": {**item, "arguments": "", "status": "in_progress"}}
        for text in chunks(item["arguments"]):
            yield "response.function_call_arguments.delta", {**address, "delta": text}
        done = {**address, "name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", done
    else:
        (part,) = item["content"]
        address |= {"content_index": 0}
        name = "reasoning_text" if item["type"] == "reasoning" else "output_text"
        more: Body = {"logprobs": []} if name == "output_text" else {}
        yield "response.output_item.added", {"item": {**item, "content": []}}
        yield "response.content_part.added", {**address, "part": {**part, "text": ""}}
        for text in chunks(part["text"]):
            yield f"response.{name}.delta", {**address, "delta": text, **more}
        yield f"response.{name}.done", {**address, "text": part["text"], **more}
        yield "response.content_part.done", {**address, "part": part}
    yield "response.output_item.done", {"item": item}


def _failure(fault: RequestError) -> str:
    code = fault.code or "server_error"
    return event(
        {"type": "error", "code": code, "message": str(fault), "param": fault.param, "sequence_number": 0}, "error"
    )


RESPONSES = Dialect(read, answer, events, error, _failure)
