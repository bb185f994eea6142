"""Chats as their template writes them: the one place that renders them.

A chat template is a program of its own. Each row gives it all that it can read (`template_inputs`); its habits
(content in parts, how a reply ends) are read from a small chat that it renders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from verl._host.user_calls import HungError, LateError, UserCode
from verl.data.forms import loaded, tool_schemas
from verl.data.prompts import SAID, content_text
from verl.errors import ConfigError, DataError, nearest, shown

#: Columns of a row that a chat template reads besides the messages.
TEMPLATE_COLUMNS = ("tools", "documents", "chat_template_kwargs")
#: Arguments of `apply_chat_template` that a row does not set.
_NOT_OF_ROWS = frozenset((
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "sanitize_control_tokens", "tokenizer_kwargs",
))  # fmt: skip
#: Seconds that a template may take for a chat.
RENDER_SECONDS = 10.0
_code = UserCode("chat template")
#: A text that no template writes by itself.
_PROBE = "8093517"
_ASK, _REPLY = {"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE[::-1]}


def template_inputs(row: Mapping[str, Any], shown: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The inputs of the chat template besides a row's messages: its columns `tools` and `documents`, and each entry of
    `chat_template_kwargs`. All three may be JSON.

    Args:
        shown: JSON schemas of the episode's tools, for rows without `tools`; a row's own tools are among them.

    Raises:
        DataError: a column is of another form, or names what a row does not set.
    """
    options = loaded(row.get("chat_template_kwargs")) or {}
    if not isinstance(options, Mapping) or (wrong := sorted(_NOT_OF_ROWS & options.keys())):
        what = f"sets {', '.join(wrong)}" if isinstance(options, Mapping) else f"is {options!r:.60}"
        raise DataError(f"column 'chat_template_kwargs' {what}: it is a mapping of variables of the chat template")
    inputs = {name: value for name, value in options.items() if value is not None}
    tools, documents = row.get("tools") or list(shown), loaded(row.get("documents"))
    if shown and tools != list(shown):
        known = [str(_tool_name(tool)) for tool in shown]
        for name in map(_tool_name, tool_schemas(tools)):
            if name not in known:
                raise DataError(f"column 'tools' has '{name}', which the episode has not: {nearest(str(name), known)}")
    return {**inputs, **({"tools": tools} if tools else {}), **({"documents": documents} if documents else {})}


def _tool_name(tool: Mapping[str, Any]) -> Any:
    function = tool.get("function")
    return (function if isinstance(function, Mapping) else tool).get("name")


class ChatTokenizer:
    """A tokenizer of transformers, and what its chat template does."""

    def __init__(self, tokenizer: Any) -> None:
        if not callable(tokenizer):
            raise ConfigError(f"tokenizer: must be one of transformers' or one like them, not {shown(tokenizer)}")
        self.tokenizer = tokenizer
        self._source = str(getattr(tokenizer, "chat_template", None) or "")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        inputs: Mapping[str, Any] | None = None,
        *,
        reply: bool = True,
        begun: bool | None = None,
        check: bool = True,
    ) -> str:
        """A chat up to where the reply begins; or, with `reply` false, the finished chat.

        Args:
            inputs: see `template_inputs`.
            begun: the reply goes on with the last message; None: if that is the assistant's.
            check: whether to look for the messages in the rendered text.

        Raises:
            DataError: the tokenizer has no chat template, or the template refuses the chat or leaves out its messages.
        """
        if not self._source:
            raise DataError(
                "the prompts are chats, but the tokenizer has no chat template: give plain text, or another tokenizer"
            )
        if not any(self._writes):
            raise DataError("the chat template does not write what messages say: set the tokenizer's chat_template")
        begun = reply and (messages[-1]["role"] == "assistant" if begun is None else begun)
        # Of what it cannot read it would still refuse some forms.
        read = {k: v for k, v in (inputs or {}).items() if k not in ("tools", "documents") or k in self._source}
        try:
            if "tools" in read:
                read["tools"] = tool_schemas(read["tools"])
            chat = self._apply(list(map(self._readable, messages)), reply and not begun, begun, **read)
        except DataError:
            raise
        except Exception as error:  # a template is a program of its own: it raises what its author chose
            raise DataError(f"the chat template cannot render {str(messages)[:200]}: {error}") from error
        try:
            chat.encode()
        except UnicodeEncodeError as error:  # as of a tool's result; data are looked at when they are read
            raise DataError(f"a message has a text that is not valid Unicode: {str(messages)[:200]}") from error
        if check:
            self._check_written(messages, chat)
        return chat

    def _check_written(self, messages: Sequence[Mapping[str, Any]], chat: str) -> None:
        """Raises DataError if a chat lacks what others than the assistant say (it may drop earlier thoughts)."""
        written = "".join(chat.split())
        for message in messages:
            text = content_text(message)
            forms = (text, json.dumps(text, ensure_ascii=False)[1:-1])
            if message["role"] != "assistant" and not any("".join(form.split()) in written for form in forms):
                raise DataError(
                    f"the chat template does not write messages of the role {message['role']} ({text[:40]!r}): take "
                    "them out, put what they say into one of the user's, or set the tokenizer's chat_template"
                )
            if not all("".join(str(_tool_name(call)).split()) in written for call in message.get("tool_calls") or ()):
                raise DataError("the chat template does not write tool_calls: put what they say into the content")

    def reply_end(self, chat: str, start: int, *, calls: bool) -> int:
        """Where in a rendered chat the reply ends that begins at `start`: behind the first token that stops generation,
        as the rest is never generated.

        Args:
            calls: the reply calls tools, and may end with another token of its own.

        Raises:
            DataError: nothing stops generation there, or the reply itself holds what does.
        """
        spell = self.tokenizer.convert_ids_to_tokens
        names = [self.added.get(token) or str(spell(token)) for token in self.ends]
        end = min((position + len(name) for name in names if (position := chat.find(name, start)) >= 0), default=None)
        if end is None:
            closing = [chat.rfind(name, start) + len(name) for name in self.added.values() if name in chat[start:]]
            if not calls or not closing:
                raise DataError(
                    f"the chat template ends a reply with {chat[start:][-20:]!r}, where nothing stops generation "
                    f"({', '.join(names) or 'the tokenizer has no eos_token'}): let it write eos_token there, or set "
                    "the tokenizer's eos_token to the token that it ends a reply with"
                )
            return max(closing)
        # What the template writes behind the end of a finished chat may be there, too.
        behind = self._tail if self.turn_end is None else self._tail.partition(self.added[self.turn_end])[2]
        rest = chat[end:]
        for name in names:
            rest, behind = rest.replace(name, ""), behind.replace(name, "")
        if not calls and rest.strip() not in ("", behind.strip()):
            raise DataError(f"the reply holds a token that stops generation ({', '.join(names)}): take it out")
        return end

    def check_reply(
        self, chat: Sequence[Mapping[str, Any]], inputs: Mapping[str, Any], before: str, whole: str
    ) -> None:
        """Raises DataError if the template leaves out what the last message of a chat says.

        Args:
            before, whole: what it writes up to that message, and in all.
        """
        *earlier, message = chat
        for name in SAID:
            if message.get(name):
                silent = {key: item for key, item in message.items() if key != name}
                try:
                    written = self.render([*earlier, silent], inputs, reply=False)
                except DataError:  # it refuses a message without
                    continue
                if written == whole:
                    raise DataError(f"the chat template does not write {name}: put what they say into the content")
        said, before, whole = ("".join(text.split()) for text in (content_text(message), before, whole))
        if said and whole.count(said) <= before.count(said):
            raise DataError(
                "the chat template leaves out a part of the reply, such as its thoughts: set the tokenizer's "
                "chat_template to one that writes all of it, or give prompt and reply as texts"
            )

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a reply: the tokenizer's EOS, and the template's own."""
        tokens = {self.tokenizer.eos_token_id, self.turn_end} - {None}
        return tuple(sorted(tokens))

    @cached_property
    def turn_end(self) -> int | None:
        """The token that the template ends a reply with: the first after it that never merges with others."""
        by_position = {self._tail.find(name): token for token, name in self.added.items() if name in self._tail}
        visible = [position for position, token in by_position.items() if self.added[token].strip()]
        return by_position[min(visible)] if visible else None

    @cached_property
    def _tail(self) -> str:
        """The text that the template writes after an assistant's message."""
        written = self._try([_ASK, _REPLY], False)
        return written.rpartition(_REPLY["content"])[2] if _REPLY["content"] in written else ""

    @cached_property
    def added(self) -> dict[int, str]:
        """Tokens that never merge with others, and how they are written."""
        return {token: str(item) for token, item in self.tokenizer.added_tokens_decoder.items()}

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer puts before every text (BOS), and behind it (EOS), where none goes on."""
        bare, text = self.encode("a"), list(self.tokenizer("a")["input_ids"])
        starts = range(len(text) - len(bare) + 1)
        start = next((first for first in starts if text[first : first + len(bare)] == bare), 0)
        return text[:start], text[start + len(bare) :]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special ones added."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @cached_property
    def _writes(self) -> tuple[bool, bool]:
        """Whether the template writes content that is a text, and content in parts."""
        text = self._try([_ASK], True)
        parts = self._try([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}], True)
        writes_text = not text or _PROBE in text  # a template that refuses this chat may still write others
        return writes_text, _PROBE in parts and (parts == text or not writes_text)

    def _readable(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message with its content as this template reads it: parts, or their text."""
        content, (writes_text, writes_parts) = message.get("content"), self._writes
        if message.get("tool_calls"):
            message = {**message, "tool_calls": list(map(self._readable_call, message["tool_calls"]))}
        if isinstance(content, list) and not writes_parts:
            return {**message, "content": content_text(message)}
        if isinstance(content, str) and not writes_text:
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def _readable_call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        """A call of a tool with its arguments as this template reads them: a mapping, or JSON of it."""
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": self._readable_call(call["function"])}
        arguments, of_text, of_mapping = call.get("arguments"), *self._writes_arguments
        if isinstance(arguments, str) and of_mapping and not of_text:
            arguments = loaded(arguments)
        elif isinstance(arguments, Mapping) and of_text and not of_mapping:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "arguments": arguments} if "arguments" in call else call

    @cached_property
    def _writes_arguments(self) -> tuple[bool, bool]:
        """Whether the template writes the arguments of calls as they are if they are JSON text, or a mapping."""
        arguments = {"of": _PROBE}
        texts = []
        for form in (json.dumps(arguments), arguments):
            call = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": form}}
            texts.append(self._try([_ASK, {"role": "assistant", "content": "", "tool_calls": [call]}], False))
        return json.dumps(arguments) in texts[0], texts[1].count(_PROBE) > 1 and str(arguments) not in texts[1]

    def _try(self, messages: list[dict[str, Any]], reply: bool) -> str:
        try:
            return self._apply(messages, reply, False) if self._source else ""
        except DataError:  # too late, as every other chat would be
            raise
        except Exception:  # what its author chose
            return ""

    def _apply(self, messages: list[Any], reply: bool, begun: bool, **read: Any) -> str:
        options = {"tokenize": False, "add_generation_prompt": reply, "continue_final_message": begun, **read}
        try:
            return str(_code.run(RENDER_SECONDS, self.tokenizer.apply_chat_template, messages, **options))
        except (LateError, HungError) as error:
            raise DataError(f"the chat template cannot render {str(messages)[:200]}: {error}") from None
