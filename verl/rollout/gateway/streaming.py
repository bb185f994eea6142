"""A reply as it is written: what is known of it is shown at once, and is what the finished reply says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verl.rollout.base import SamplingParams
from verl.rollout.gateway.messages import Message
from verl.rollout.gateway.replies import Tools, without_begun
from verl.rollout.gateway.template import ChatTemplate
from verl.rollout.stop_strings import StopWatch


class ReplyStream:
    """One reply.

    Args:
        prompt: what the template wrote before it.
        tools: those that it may call.
        tell: called with what is new of its thought and of its text.
    """

    def __init__(
        self,
        template: ChatTemplate,
        params: SamplingParams,
        prompt: str,
        tools: Tools,
        tell: Callable[[str, str], None],
    ) -> None:
        self._template, self._params, self._prompt, self._tools, self._tell = template, params, prompt, tools, tell
        self._watch = StopWatch(template.text, params.stop, params.min_new_tokens)
        self._count = 0
        self._shown = ("", "")

    def read(self, tokens: Sequence[int]) -> None:
        """Take the tokens so far, and tell what no later token can change."""
        if len(tokens) > self._count:
            self._advance(tokens)
            text = without_begun(self._watch.text, self._params.stop)
            self._tell_all(*self._template.parse.settled(text, self._prompt, self._tools))

    def finish(self, tokens: Sequence[int]) -> str:
        """The text of the finished reply, up to the stop string that ended it."""
        self._advance(tokens)
        self._watch.saw_stop(tokens, final=True)
        return self._watch.text

    def tell_rest(self, reply: Message) -> None:
        self._tell_all(reply.reasoning, reply.content)

    def _advance(self, tokens: Sequence[int]) -> None:
        """Each token by itself, as the engine looks for stop strings."""
        for count in range(self._count + 1, len(tokens) + 1):
            self._watch.saw_stop(tokens[:count])
        self._count = len(tokens)

    def _tell_all(self, *parts: str) -> None:
        new = [part[len(shown) :] for part, shown in zip(parts, self._shown, strict=True)]
        if any(new):
            self._shown = (self._shown[0] + new[0], self._shown[1] + new[1])
            self._tell(*new)
