"""A conversation as the gateway keeps it, whichever dialect it came in, and when two messages are equal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any


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

    def for_template(self, reasoning: str) -> Mapping[str, Any]:
        """As chat templates read it, with its thought under the name `reasoning`."""
        return {**self._shown, reasoning: self.reasoning} if self.reasoning else self._shown

    @cached_property
    def _shown(self) -> Mapping[str, Any]:
        """Made once for all prompts with this message."""
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
