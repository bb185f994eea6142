"""OpenAI's `/v1/chat/completions` (platform.openai.com/docs/api-reference/chat), with the `reasoning_content` of
servers of open models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from verl.rollout.gateway.dialects import base
from verl.rollout.gateway.dialects.base import Body, ChatAnswer, ChatRequest, Part, RequestError
from verl.rollout.gateway.messages import THOUGHTS, Message, ToolCall

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_PARTS = {"text": "text", "refusal": "refusal"}


class ChatEvents(base.Events):
    """See `Events`."""

    def begin(self, answer: ChatAnswer) -> Iterator[str]:
        whole = {**CHAT.answer(self.request, answer), "object": "chat.completion.chunk"}
        self._head = {name: whole[name] for name in ("id", "object", "created", "model")}
        self._head |= {"usage": None} if self.request.stream_usage else {}
        for index in range(len(answer.replies)):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def part(self, part: Part) -> Iterator[str]:
        for name, text in (("reasoning_content", part.reasoning), ("content", part.content)):
            if text:
                yield self._chunk(part.index, {name: text})

    def end(self, answer: ChatAnswer) -> Iterator[str]:
        whole = CHAT.answer(self.request, answer)
        for index, choice in enumerate(whole["choices"]):
            for number, call in enumerate(choice["message"].get("tool_calls", ())):
                begun = {**call, "function": {**call["function"], "arguments": ""}}
                yield self._chunk(index, {"tool_calls": [{"index": number, **begun}]})
                for text in base.chunks(call["function"]["arguments"]):
                    yield self._chunk(index, {"tool_calls": [{"index": number, "function": {"arguments": text}}]})
            # With the log-probs of all tokens: which of them a text is of is known at its end.
            yield self._chunk(index, {}, choice["finish_reason"], choice["logprobs"])
        if self.request.stream_usage:
            yield base.event({**self._head, "choices": [], "usage": whole["usage"]})
        yield "data: [DONE]\n\n"

    def _chunk(self, index: int, delta: Body, finish: str | None = None, log_probs: Body | None = None) -> str:
        choice = {"index": index, "delta": delta, "logprobs": log_probs, "finish_reason": finish}
        return base.event({**self._head, "choices": [choice]})


class Chat(base.Dialect):
    fields = frozenset((
        "model", "messages", "tools", "tool_choice", "response_format", "max_tokens", "max_completion_tokens", "stop",
        "n", "logprobs", "top_logprobs", "stream", "stream_options",
    ))  # fmt: skip
    defaults: ClassVar = {
        "parallel_tool_calls": (True,),
        "store": (False,),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "metadata": ({},),
    }
    refused: ClassVar = {
        "store": "nothing is stored",
        "functions": "send them as tools",
        "function_call": "send tool_choice",
        "audio": "models of text are trained here",
        "modalities": "models of text are trained here",
    }
    limits = ("max_tokens", "max_completion_tokens")
    tool_field = "function"
    events = ChatEvents

    def read(self, body: Body) -> ChatRequest:
        request = super().read(body)
        if request.top_log_probs and not request.log_probs:
            raise base.invalid("top_logprobs", "'top_logprobs' needs logprobs: true")
        return request

    def messages(self, body: Body) -> Iterator[Message]:
        messages = base.listed(body.get("messages"), "messages")
        if not messages:
            raise base.invalid("messages", "'messages' is empty")
        for index, message in enumerate(messages):
            where, role = f"messages[{index}]", _ROLES.get(str(message.get("role")))
            if role is None:
                known = ", ".join(_ROLES)
                raise RequestError(400, f"'{where}.role' is one of {known}, not {message.get('role')!r:.40}", where)
            content = base.joined(message.get("content"), f"{where}.content", _PARTS)
            calls = base.listed(message.get("tool_calls") or [], f"{where}.tool_calls")
            thought = next((message[name] for name in THOUGHTS if isinstance(message.get(name), str)), "")
            call_id = base.typed(message, "tool_call_id", str, "")
            yield Message(role, content, tuple(_call(call, where) for call in calls), thought, call_id)

    def schema(self, body: Body) -> Body | None:
        wanted = base.typed(body, "response_format", dict, {})
        schema = base.typed(wanted, "json_schema", dict, {}).get("schema")
        return base.schema_of(wanted, schema, "response_format")

    def answer(self, request: ChatRequest, answer: ChatAnswer) -> Body:
        choices = []
        for index, reply in enumerate(answer.replies):
            message, log_probs = reply.message, None
            calls = [call.shown for call in message.calls]
            content = message.content or (None if calls else "")
            said: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            optional: Body = {"reasoning_content": message.reasoning, "tool_calls": calls}
            said |= {name: value for name, value in optional.items() if value}
            if request.log_probs:
                log_probs = {"content": base.shown_tokens(reply.tokens), "refusal": None}
            choices.append({"index": index, "message": said, "logprobs": log_probs, "finish_reason": reply.finish})
        name = f"chatcmpl-{answer.replies[0].id}"
        head = {"id": name, "object": "chat.completion", "created": answer.created, "model": request.model}
        tokens = {
            "prompt_tokens": answer.prompt,
            "completion_tokens": answer.sampled,
            "total_tokens": answer.prompt + answer.sampled,
            "prompt_tokens_details": {"cached_tokens": answer.cached},
        }
        return {**head, "choices": choices, "usage": tokens}


def _call(call: Body, where: str) -> ToolCall:
    function = base.typed(call, "function", dict, {})
    if not isinstance(function.get("name"), str):
        raise base.invalid(where, f"'{where}' has a call without a function's name")
    return ToolCall(function["name"], base.typed(function, "arguments", str, "{}"), base.typed(call, "id", str, ""))


CHAT = Chat()
