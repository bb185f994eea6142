"""Text of a response as it grows, watched for stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl.data.text import ResponseText, spelled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.rollout.base import SamplingParams

_UNFINISHED = "\ufffd"


class StopWatch:
    """Decodes only the newest tokens, so that a response costs time linear in its length.

    A token is decoded after the ones before it (tokenizers treat a beginning differently); of the newest, bytes that
    are no whole character yet are held back.
    """

    def __init__(self, decode: ResponseText, stops: Sequence[str], min_tokens: int = 0) -> None:
        self.text = ""
        self._whole = ""  # of tokens that need not be decoded again
        self._decode = decode
        self._stops, self._min_tokens = tuple(stops), min_tokens
        self._before: list[int] = []  # the newest tokens that wrote something of it
        self._read = self._seen = 0
        self._cut = False

    def read(self, tokens: Sequence[int], final: bool = False) -> str:
        """The text of `tokens`, but for an unfinished character at its end unless they are `final`; once a stop string
        was seen, what came before it."""
        if self._cut:
            return self.text
        newest = list(tokens[self._read :])
        after = self._decode([*self._before, *newest])
        new = after[len(self._decode(self._before)) :]
        if final or not after.endswith(_UNFINISHED):
            self._whole += new
            self._read = len(tokens)
            # Behind tokens that write nothing (ends, padding) the next would be decoded as the beginning of a text.
            if new:
                self._before = newest
            elif not self._whole:
                self._before += newest
            new = ""
        self.text = self._whole + new.rstrip(_UNFINISHED)
        return self.text

    def saw_stop(self, tokens: Sequence[int], final: bool = False) -> bool:
        """Whether a stop string ends in the new `tokens`; `text` is then cut before the first one. One that has
        ended before there are `min_tokens` does not count."""
        text = self.read(tokens, final)
        counting = self._stops if len(tokens) >= self._min_tokens else ()
        begins = ((stop, max(0, self._seen + 1 - len(stop))) for stop in counting)
        starts = [start for stop, begin in begins if (start := text.find(stop, begin)) >= 0]
        self._seen = len(text)
        if starts:
            self.text, self._cut = text[: min(starts)], True
        return bool(starts)


def cut_text(decode: ResponseText, tokens: Sequence[int], params: SamplingParams) -> str:
    """The text of a finished response, up to the stop string that ended it."""
    watch = StopWatch(decode, params.stop, params.min_new_tokens)
    watch.saw_stop(tokens[: max(params.min_new_tokens - 1, 0)])
    watch.saw_stop(tokens, final=True)
    return watch.text


def special_token(tokenizer: PreTrainedTokenizerBase, stop: str) -> int | None:
    """The special token that is written so, if there is one: of an end or padding the text shows nothing."""
    token: Any = tokenizer.convert_tokens_to_ids(stop)
    if not isinstance(token, int) or spelled(tokenizer, [token]) != stop:
        return None
    return None if tokenizer.decode([token], skip_special_tokens=True) else token
