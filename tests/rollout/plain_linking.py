"""Linking as plain as can be: on texts, quadratic, every conversation rendered anew. It judges the gateway's.

A call is a list of messages as OpenAI's chat has them, and the text that the policy wrote. Its transcript is a list of
(who wrote it, text), where the policy's parts are named by the number of the call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Chat = list[dict[str, Any]]


@dataclass
class PlainCall:
    """A call, and what became of it.

    Attributes:
        reply: what the policy wrote, as a message.
        wrote: the text of it, with what ended it.
        chat: messages with thoughts put back.
        text: what the template writes for them.
        parent: number of the call that this one continues.
        behind: what the template writes behind the parent's reply; without a parent, the whole text.
    """

    chat: Chat
    reply: dict[str, Any]
    wrote: str
    kept: bool = True
    text: str = ""
    parent: int | None = None
    behind: str = ""


@dataclass
class PlainEpisode:
    """Args:
    render: messages, tools and whether a reply follows -> text.
    end: how the template ends a reply: whether it calls, and whether there are tools -> token.
    special: tokens that never merge with others.
    """

    render: Callable[[Chat, Any, bool], str]
    end: Callable[[bool, bool], str]
    special: Sequence[str]
    calls: list[PlainCall] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)

    def call(self, messages: Chat, tools: Any, reply: dict[str, Any], wrote: str, kept: bool = True) -> PlainCall:
        made = PlainCall(list(messages), reply, wrote, kept)
        candidates = [n for n, earlier in enumerate(self.calls) if begins(messages, [*earlier.chat, earlier.reply])]
        parents = {earlier.parent for earlier in self.calls}
        candidates.sort(key=lambda n: (-len(self.calls[n].chat), not self.calls[n].kept, n in parents, n))
        texts = []
        for number in candidates:
            earlier = self.calls[number]
            whole = [*earlier.chat, earlier.reply, *messages[len(earlier.chat) + 1 :]]
            text = self.render(whole, tools, True)
            texts.append((whole, text))
            end = self.end(bool(earlier.reply.get("tool_calls")), bool(self.tools[number]))
            reply, found, rest = text[len(earlier.text) :].partition(end)
            if not (text.startswith(earlier.text) and found and shows(reply, earlier)):
                continue
            made.chat, made.text, made.parent = whole, text, number
            made.behind = rest if earlier.wrote.endswith(end) else end + rest
            break
        else:
            made.chat, made.text = texts[0] if texts else (made.chat, self.render(messages, tools, True))
            made.behind = made.text
        self.calls.append(made)
        self.tools.append(tools)
        return made

    def ancestors(self, number: int | None) -> list[int]:
        return [] if number is None else [*self.ancestors(self.calls[number].parent), number]

    def trajectories(self) -> list[list[int]]:
        """The calls of each, in order."""
        needed = {a for number, call in enumerate(self.calls) if call.kept for a in self.ancestors(number)}
        lines: list[list[int]] = []
        for number in sorted(needed):
            parent = self.calls[number].parent
            line = next((line for line in lines if line[-1] == parent), None)
            if line is None:
                lines.append([number])
            else:
                line.append(number)
        return lines

    def characters(self) -> int:
        """How many characters are tokenised, if each is once: all but those that other texts in the same place begin
        with, up to a special token."""
        places: dict[int | None, set[str]] = {}
        for call in self.calls:
            texts = places.setdefault(call.parent, set())
            pieces = cut(call.behind, self.special)
            texts |= {"".join(pieces[: n + 1]) for n in range(len(pieces))}
        return sum(len(cut(text, self.special)[-1]) for texts in places.values() for text in texts)


def cut(text: str, ends: Sequence[str]) -> list[str]:
    """A text in pieces, each up to a special token."""
    pieces = [""]
    while text:
        name = next((end for end in ends if text.startswith(end)), text[0])
        pieces[-1] += name
        text = text[len(name) :]
        if name in ends:
            pieces.append("")
    return [piece for piece in pieces if piece]


def begins(messages: Chat, beginning: Chat) -> bool:
    return len(messages) >= len(beginning) and all(map(equal, messages, beginning))


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return said(one) == said(other) and (thought(one) in ("", thought(other)))


def thought(message: dict[str, Any]) -> str:
    return (message.get("reasoning_content") or "").strip()


def said(message: dict[str, Any]) -> Any:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return message["role"], (content or "").strip(), [(c["name"], json.loads(c["arguments"])) for c in calls]


def shows(text: str, call: PlainCall) -> bool:
    names = [each["function"]["name"] for each in call.reply.get("tool_calls") or []]
    return all(part in text for part in [(call.reply.get("content") or "").strip(), thought(call.reply), *names])
