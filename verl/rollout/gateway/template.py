"""A chat template as the gateway uses it: what it writes, how it closes a reply, and whether it shows tools at all."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.data.chat import ChatTokenizer
from verl.data.text import ResponseText, spelled
from verl.errors import ConfigError, DataError
from verl.rollout.gateway.messages import Message, ReplyParser, ToolCall, Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: By name. `hermes.jinja` is for models whose own template knows no tools: ChatML, with calls and results as Hermes and
#: Qwen 2.5 write them. A message ends with the tokenizer's EOS, so that generation stops there. It has subscripts, as
#: jinja's sandbox checks each attribute.
OURS = {"hermes": (Path(__file__).parent / "hermes.jinja").read_text(encoding="utf-8")}
#: Words that no template has by itself: of the tool, the key and the value of an argument, the result, the thought.
_TOOL, _KEY, _VALUE, _RESULT, _THOUGHT = "probe_8093", "key_5170", "value_3926", "result_6482", "thought_7731"
_SCHEMA = {"type": "object", "properties": {_KEY: {"type": "string", "description": "?"}}, "required": [_KEY]}
_ASKED = Message("user", "?")
_SAID = Message("assistant", "", (ToolCall(_TOOL, json.dumps({_KEY: _VALUE}), "call00001"),), _THOUGHT)
_PROBE = {"type": "function", "function": {"name": _TOOL, "description": "?", "parameters": _SCHEMA}}


class ChatTemplate:
    """A tokenizer's chat template, or another one, for the conversations of agents.

    Args:
        chat_template: another one: one of ours by name ("hermes"), or a file; None: the tokenizer's.
        ends: tokens that end a response, besides the tokenizer's own.

    Raises:
        ConfigError: there is no such file, or the tokenizer has no template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None, ends: Iterable[int] = ()
    ) -> None:
        tokenizer = with_template(tokenizer, chat_template)
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("the tokenizer has no chat template: name one, as chat_template='hermes'")
        self.chat = ChatTokenizer(tokenizer)
        self.ends = (*self.chat.ends, *ends)
        self.text = ResponseText(tokenizer, self.ends)
        self._ending = cache(self._ending_of)
        self.parse = ReplyParser(tokenizer, str(tokenizer.chat_template))

    def write(
        self, messages: Sequence[Message], tools: Tools = (), inputs: Mapping[str, Any] | None = None, *, reply: bool
    ) -> str:
        """A chat up to where the reply begins; or, with `reply` false, the finished chat.

        Raises:
            DataError: the template refuses it.
        """
        shown = {**(inputs or {}), **({"tools": list(tools)} if tools else {})}
        thought = self.parse.thought or "reasoning_content"
        chat = [{**each.shown, thought: each.reasoning} if each.reasoning else each.shown for each in messages]
        return self.chat.render(chat, shown, reply=reply, begun=False, check=False)

    def behind(self, text: str, before: str, reply: Message, has_tools: bool, last: Sequence[int]) -> str | None:
        """The text after the tokens of a reply in a longer chat, with the end of the reply if they lack it.

        Args:
            text: the longer chat.
            before: what it wrote up to the reply.
            last: the last token of the reply, if it has one.

        Returns:
            None if it now writes the chat up to there in another way, drops a part of the reply, or does not end it.
        """
        end = self._ending(bool(reply.calls), has_tools)
        position = text.find(end, len(before)) if end and text.startswith(before) else -1
        parts = (reply.content, reply.reasoning, *(call.name for call in reply.calls))
        if position < 0 or not all(part.strip() in text[len(before) : position] for part in parts):
            return None
        return text[position + len(end) :] if spelled(self.chat.tokenizer, last) == end else text[position:]

    def _ending_of(self, calls: bool, has_tools: bool) -> str:
        """How the template ends a reply: text or calls, in a chat with tools or without; "" if it does not."""
        said, text = replace(_SAID, calls=_SAID.calls if calls else (), content="" if calls else _VALUE), ""
        with suppress(DataError):
            text = self.write([_ASKED, said], [_PROBE] if has_tools else (), reply=False)
            text = text[: self.chat.reply_end(text, text.rfind(_VALUE), calls=calls)]
        names = (*self.chat.added.values(), *map(self.chat.tokenizer.convert_ids_to_tokens, self.chat.ends))
        return max((name for name in names if name and text.endswith(name)), key=len, default="")

    def check(self) -> list[str]:
        """["thoughts"] if the template drops them; it shows everything else that an agent needs.

        Raises:
            ConfigError: it does not show tools, calls or results, or its calls cannot be read back.
        """
        result = Message("tool", _RESULT, call_id=_SAID.calls[0].id)
        try:
            first = self.write([_ASKED], [_PROBE], reply=True)
            closed = self.write([_ASKED, _SAID], [_PROBE], reply=False)
            whole = self.write([_ASKED, _SAID, result], [_PROBE], reply=True)
        except DataError as error:
            raise ConfigError(f"an agent cannot be trained with this chat template: {error}; {_REMEDY}") from error
        behind = closed[len(first) :] if closed.startswith(first) else closed
        missing = [what for what, name, text in (
            ("the tools of a request", _TOOL, first), ("the name of a call", _TOOL, behind),
            ("the arguments of a call", _KEY, behind), ("the arguments of a call", _VALUE, behind),
            ("the result of a call", _RESULT, whole),
        ) if name not in text]  # fmt: skip
        if missing:
            raise ConfigError(f"the chat template does not show {missing[0]}, which an agent needs; {_REMEDY}")
        if closed.startswith(first):
            reply = behind.partition(self._ending(True, True) or behind)[0]
            if [each.name for each in self.parse(reply, first, [_PROBE]).calls] != [_TOOL]:
                raise ConfigError(f"how this chat template writes calls ({reply!r:.80}) is no known syntax; {_REMEDY}")
        return [] if _THOUGHT in whole or not self.parse.splits_thoughts else ["thoughts"]


#: Those of the latest episodes, which share what they learn of it.
template_of = lru_cache(maxsize=8)(ChatTemplate)
_REMEDY = "name another one: chat_template='hermes', or a file"


def with_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer with another chat template, see `ChatTemplate`; None: as it is."""
    if chat_template is None:
        return tokenizer
    tokenizer = copy.copy(tokenizer)
    try:
        tokenizer.chat_template = OURS.get(chat_template) or Path(chat_template).read_text(encoding="utf-8")
    except OSError as error:
        known = f"'{chat_template}' is neither one of ours ({', '.join(OURS)}) nor a file"
        raise ConfigError(f"chat_template: {known}: {error}") from error
    return tokenizer
