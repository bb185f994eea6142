"""A conversation as the gateway keeps it, whichever dialect it came in, when two messages are equal, and a policy's
text as a message: its thought, its text, and its tool calls, in the syntax of its model family.

A family is known by the markers in its chat template. What does not parse is text. Sources: the templates that these
models are released with: Qwen 2.5 and 3 (Hermes' JSON), Qwen3-Coder (XML), Llama 3.1, Mistral (a list, and `[ARGS]`),
DeepSeek V3 and V3.1, gpt-oss (Harmony).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

Tools = Sequence[Mapping[str, Any]]
#: Names under which templates read a message's thought.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_DECODER = json.JSONDecoder()
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_CALLS = "<｜tool▁calls▁begin｜>"
_DEEPSEEK = re.compile(f"{_CALLS}|{_BEGIN}(.*?){_END}|<｜tool▁calls▁end｜>", re.DOTALL)
_FENCE = re.compile(r"\s*(\S+)\s*```json\n(.*)\n```\s*", re.DOTALL)
_XML = re.compile(r"<tool_call>\s*<function=([^>\n]+)>(.*?)</function>\s*</tool_call>", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_MISTRAL = re.compile(r"\s*\[TOOL_CALLS\]\s*")
_ARGS = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*")
_HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?(.*?)<\|message\|>(.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)", re.DOTALL
)
_THINK, _THOUGHT_END, _PYTHON = "<think>", "</think>", "<|python_tag|>"
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; `arguments` are JSON, as the policy or the client wrote it."""

    name: str
    arguments: str
    id: str = ""

    @property
    def shown(self) -> dict[str, Any]:
        """As OpenAI's dialect of chats and chat templates have it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: system, user, assistant or tool.
        reasoning: what the assistant thought before; a client need not send it back.
        call_id: of the call that a tool's message answers.
    """

    role: str
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    call_id: str = ""

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Equal for messages of one role, one text (but for outer white space) and the same calls in order, by name and
        value of the arguments. Ids, and how JSON is written, do not count."""
        said = self.role, self.content.strip()
        return (*said, *((call.name, _json_value(call.arguments)) for call in self.calls)) if self.calls else said

    @cached_property
    def shown(self) -> Mapping[str, Any]:
        """As chat templates read it, without its thought. Made once for all prompts with this message."""
        optional = {"tool_calls": [call.shown for call in self.calls], "tool_call_id": self.call_id}
        return {"role": self.role, "content": self.content, **{key: value for key, value in optional.items() if value}}


def _json_value(text: str) -> str:
    """Text that is equal for equal values of JSON; invalid JSON is compared as text."""
    try:
        # 1.0 is the value 1: clients of other languages write it so.
        whole = lambda text: int(value) if (value := float(text)).is_integer() else value  # noqa: E731
        return json.dumps(json.loads(text or "{}", parse_float=whole), sort_keys=True)
    except (ValueError, RecursionError):
        return f"no JSON: {text.strip()}"


def longer(digest: int, message: Message) -> int:
    """The hash of a conversation with one message more; of an empty one it is 0."""
    return hash((digest, message.key))


class NoCallError(ValueError):
    """A text begins like a tool call, but does not parse as one."""


def _call(value: Any) -> ToolCall:
    """A call as JSON: `{"name", "arguments"}`, Llama's `parameters`, or one inside `function`."""
    value = value.get("function", value) if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise NoCallError("a call has a name")
    value["name"].encode()  # half of a pair of UTF-16 is no text: that is a ValueError
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON, which stays as it was written
        _arguments(json.loads(arguments))
        return ToolCall(value["name"], arguments)
    return ToolCall(value["name"], _arguments(arguments))


def _arguments(value: Any) -> str:
    if not isinstance(value, Mapping):
        raise NoCallError("arguments are a mapping")
    text = json.dumps(value, ensure_ascii=False)
    text.encode()  # as above
    return text


def _json_at(text: str, start: int) -> tuple[Any, int]:
    """A value of JSON, and where the text goes on behind it and white space."""
    value, end = _DECODER.raw_decode(text, len(text) - len(text[start:].lstrip()))
    return value, len(text) - len(text[end:].lstrip())


def _hermes(text: str, tools: Tools) -> Message:
    said, calls, start = "", [], 0
    while (begin := text.find("<tool_call>", start)) >= 0:
        value, end = _json_at(text, begin + len("<tool_call>"))
        if not text.startswith("</tool_call>", end):
            raise NoCallError("a call ends with </tool_call>")
        calls.append(_call(value))
        said, start = said + text[start:begin], end + len("</tool_call>")
    return Message("assistant", said + text[start:], tuple(calls))


def _qwen_xml(text: str, tools: Tools) -> Message:
    calls = []
    for name, body in _XML.findall(text):
        if _PARAMETER.sub("", body).strip():
            raise NoCallError("a call has parameters only")
        functions = [tool.get("function", tool) for tool in tools]
        schema: Any = next((f.get("parameters") or {} for f in functions if f.get("name") == name), {})
        types = {key: value.get("type") for key, value in (schema.get("properties") or {}).items()}
        values = dict[str, Any](_PARAMETER.findall(body))
        for key, value in values.items():
            if types.get(key) not in (None, "string"):
                with suppress(ValueError):  # of another type than text it is JSON
                    values[key] = json.loads(value)
        calls.append(ToolCall(name, _arguments(values)))
    rest = _XML.sub("", text)
    if "<tool_call>" in rest:
        raise NoCallError("a call has a function")
    return Message("assistant", rest, tuple(calls))


def _mistral(text: str, tools: Tools) -> Message:
    said, *parts = _MISTRAL.split(text)
    calls: list[ToolCall] = []
    for part in parts:
        head = _ARGS.match(part)
        value, end = _json_at(part, head.end() if head else 0)
        if part[end:].strip():
            raise NoCallError("text behind a call")
        calls += [ToolCall(head[1], _arguments(value))] if head else map(_call, value)
    return Message("assistant", said, tuple(calls))


def _llama3(text: str, tools: Tools) -> Message:
    bare = text.replace(_PYTHON, "").strip()
    if not bare.startswith("{"):
        return Message("assistant", text)
    value, end = _json_at(bare, 0)
    if end < len(bare):
        raise NoCallError("text behind a call")
    return Message("assistant", "", (_call(value),))


def _deepseek(text: str, tools: Tools) -> Message:
    calls = []
    for block in filter(None, _DEEPSEEK.findall(text)):
        head, _, rest = block.partition(_SEP)
        fence = _FENCE.fullmatch(rest)
        name, arguments = fence.groups() if fence else (head, rest)
        calls.append(ToolCall(name.strip(), _arguments(json.loads(arguments))))
    rest = _DEEPSEEK.sub("", text)
    if _BEGIN in rest:
        raise NoCallError("a call ends")
    return Message("assistant", rest, tuple(calls))


def _harmony(text: str, tools: Tools) -> Message:
    parts: dict[str, list[str]] = {"analysis": [], "final": []}
    calls = []
    for head, body in _HARMONY.findall(text):
        if recipient := _RECIPIENT.search(head):
            if not tools:
                raise NoCallError("there are no tools")
            calls.append(ToolCall(recipient[1], _arguments(json.loads(body))))
        else:
            parts["analysis" if "analysis" in head else "final"].append(body)
    if "<|message|>" not in text:
        return Message("assistant", text)
    return Message("assistant", "".join(parts["final"]), tuple(calls), "\n".join(parts["analysis"]))


@dataclass(frozen=True)
class Family:
    """A syntax of calls.

    Attributes:
        markers: its chat templates have all of them.
        starts: a reply without any of these calls no tool.
        parse: raises ValueError if a call is malformed.
    """

    name: str
    markers: tuple[str, ...]
    starts: tuple[str, ...]
    parse: Callable[[str, Tools], Message]


#: The more particular first: Qwen's XML is inside Hermes' markers.
FAMILIES = (
    Family("gpt-oss", ("<|channel|>", "<|message|>"), ("<|message|>",), _harmony),
    Family("deepseek", (_BEGIN,), (_BEGIN,), _deepseek),
    Family("mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), _mistral),
    Family("qwen xml", ("<function=", "<parameter="), ("<tool_call>",), _qwen_xml),
    Family("hermes", ("<tool_call>",), ("<tool_call>",), _hermes),
    Family("llama 3", ("<|start_header_id|>", "tool_calls"), ("{",), _llama3),
)


class ReplyParser:
    """Parses replies of one model.

    Args:
        tokenizer: whose `response_template` parses, where it has one.
        source: its chat template, which shows the family otherwise.
    """

    def __init__(self, tokenizer: Any, source: str) -> None:
        has_template = getattr(tokenizer, "response_template", None) is not None
        self._by_template = tokenizer.parse_response if has_template else None
        self.family = next((f for f in FAMILIES if all(marker in source for marker in f.markers)), None)
        #: Under which name the template reads thoughts, if it does.
        self.thought = next((name for name in THOUGHTS if name in source), None)
        self.splits_thoughts = self.thought is not None or "</think>" in source

    def __call__(self, text: str, prompt: str = "", tools: Tools = ()) -> Message:
        """The message that a reply is.

        Args:
            text: of the reply, without the token that ended it.
            prompt: what the template wrote before it, which may begin its thought.
            tools: JSON schemas of those that it may call; without them nothing is a call.
        """
        try:
            if self._by_template is not None:
                parsed = self._by_template(text, prefix=prompt, tools=list(tools) or None)
                calls = tuple(_call(call) for call in parsed.get("tool_calls") or ())
                thought = next((str(parsed[name]) for name in THOUGHTS if parsed.get(name)), "")
                return Message("assistant", str(parsed.get("content") or ""), calls, thought)
            if self.family is not None and self.family.name == "gpt-oss":
                return self.family.parse(text, tools)
        except Exception:  # of the tokenizer's own rules, too: what does not parse is text
            return Message("assistant", text)
        thought, said = _divided(text, prompt) if self.splits_thoughts else ("", text)
        return replace(self._called(said, tools), reasoning=thought)

    def settled(self, text: str, prompt: str = "", tools: Tools = ()) -> tuple[str, str]:
        """How the thought and the text of an unfinished reply begin, whatever follows; see `__call__`.

        Its calls, and all of a reply in Harmony or of a tokenizer's own syntax, are known when it has ended: one that
        does not parse is text.
        """
        if self._by_template is not None or (self.family is not None and self.family.name == "gpt-oss"):
            return "", ""
        if not self.splits_thoughts:
            return "", self._settled_text(text, tools)
        begin, is_begun = text.lstrip(), prompt.rstrip().endswith(_THINK)
        if not is_begun and len(begin) < len(_THINK) and _THINK.startswith(begin):
            return "", ""
        thought, said = _divided(text, prompt)
        if (is_begun or begin.startswith(_THINK)) and _THOUGHT_END not in text:
            return without_begun(thought, [_THOUGHT_END]).rstrip("\n"), ""
        return thought, self._settled_text(said, tools)

    def _settled_text(self, text: str, tools: Tools) -> str:
        if self.family is None or not tools:
            return text
        if self.family.name == "llama 3":  # a call is the whole reply
            bare = text.replace(_PYTHON, "").strip()
            return "" if bare.startswith("{") or _PYTHON.startswith(bare) else text
        starts = (*self.family.starts, _CALLS) if self.family.name == "deepseek" else self.family.starts
        return without_begun(min((text.partition(start)[0] for start in starts), key=len), starts).rstrip()

    def _called(self, text: str, tools: Tools) -> Message:
        if self.family is None or not tools or not any(start in text for start in self.family.starts):
            return Message("assistant", text)
        try:
            message = self.family.parse(text, tools)
        except (ValueError, TypeError, RecursionError):
            return Message("assistant", text)
        return replace(message, content=message.content.rstrip()) if message.calls else message


def without_begun(text: str, marks: Sequence[str]) -> str:
    """A text without an end that may be the beginning of one of these."""
    for size in range(max(map(len, marks), default=1) - 1, 0, -1):
        if any(len(mark) > size and text.endswith(mark[:size]) for mark in marks):
            return text[:-size]
    return text


def _divided(text: str, prompt: str) -> tuple[str, str]:
    """The thought of a reply, whether the prompt or the policy began it, and the rest."""
    if not prompt.rstrip().endswith(_THINK):
        blank, begin, rest = text.partition(_THINK)
        if not begin or blank.strip():
            return "", text
        text = rest
    thought, _, said = text.partition(_THOUGHT_END)
    return thought.strip("\n"), said.lstrip("\n")
