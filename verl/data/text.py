"""Token ids as text: one decoder for all that is read, by rewards, tools, guards or people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def spelled(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens: every special token is spelt out, and no space is "cleaned up"."""
    options = {"clean_up_tokenization_spaces": False, "spaces_between_special_tokens": False}
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, **options))


def behind_thoughts(text: str) -> str:
    """A response without the thoughts that end with `</think>`, whether the prompt or the model began them."""
    return text.rpartition("</think>")[2]


class ResponseText:
    """The text of a response: everything but its ends and padding. Other special tokens, such as `<think>`, are spelt
    out.

    Args:
        ends: tokens that end a response. One that is no special token is text wherever it ends nothing.
    """

    def __init__(self, tokenizer: Any, ends: Iterable[int]) -> None:
        self.tokenizer = tokenizer
        self.ends = frozenset(ends)
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        self._left_out = self.ends & special | {tokenizer.pad_token_id}

    def __call__(self, tokens: Sequence[int]) -> str:
        if tokens and tokens[-1] in self.ends:
            tokens = tokens[:-1]
        return spelled(self.tokenizer, [token for token in tokens if token not in self._left_out])
