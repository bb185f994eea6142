"""Text of a response as it grows, watched for stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\ufffd"


class StopWatch:
    """Decodes only the newest tokens, so that a response costs time linear in its length.

    A token is decoded after the ones before it (tokenizers treat a beginning differently), and held back while its
    bytes are no whole character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._overlap = max(map(len, self._stops)) - 1
        self._start = self._read = 0

    def saw_stop(self, tokens: Sequence[int], final: bool = False) -> bool:
        """Whether a stop string ends in what is new of `tokens`; `text` is then cut before the first one."""
        before = self._decode(tokens[self._start : self._read])
        after = self._decode(tokens[self._start :])
        if after.endswith(_UNFINISHED) and not final:
            return False
        searched = max(0, len(self.text) - self._overlap)
        self.text += after[len(before) :]
        self._start, self._read = self._read, len(tokens)
        found = [at for stop in self._stops if (at := self.text.find(stop, searched)) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    def _decode(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)
