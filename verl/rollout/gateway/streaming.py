"""A reply while it is sampled: whatever no later token can change is shown at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl.rollout.base import SamplingParams
from verl.rollout.gateway.replies import Tools, without_begun
from verl.rollout.gateway.template import ChatTemplate
from verl.rollout.stop_strings import StopWatch


@dataclass
class ReplyStream:
    """One reply.

    Attributes:
        prompt: the rendered chat before it.
        tools: those that it may call.
        send: called with the deltas of its thought and of its text.
    """

    template: ChatTemplate
    params: SamplingParams
    prompt: str
    tools: Tools
    send: Callable[[str, str], None]

    def __post_init__(self) -> None:
        self._watch = StopWatch(self.template.text, self.params.stop, self.params.min_new_tokens)
        self._count, self._shown = 0, ("", "")

    def read(self, tokens: Sequence[int]) -> None:
        """Take the tokens so far, and show whatever no later token can change."""
        if len(tokens) > self._count:
            self._advance(tokens)
            text = without_begun(self._watch.text, self.params.stop)
            self.show(*self.template.parse.settled(text, self.prompt, self.tools))

    def finish(self, tokens: Sequence[int]) -> str:
        """The text of the finished reply, up to the stop string that ended it."""
        self._advance(tokens)
        self._watch.saw_stop(tokens, final=True)
        return self._watch.text

    def _advance(self, tokens: Sequence[int]) -> None:
        """Each token by itself, as the engine looks for stop strings."""
        for count in range(self._count + 1, len(tokens) + 1):
            self._watch.saw_stop(tokens[:count])
        self._count = len(tokens)

    def show(self, *parts: str) -> None:
        """Send what is new of the thought and of the text."""
        new = [part[len(shown) :] for part, shown in zip(parts, self._shown, strict=True)]
        if any(new):
            self._shown = (self._shown[0] + new[0], self._shown[1] + new[1])
            self.send(*new)
