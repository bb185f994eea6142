"""Carrying per-token numbers between two tokenizers by character position."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl.batch import Batch
from verl.data.text import spelled
from verl.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Tokens between two anchors of a text that is decoded piece by piece.
_WINDOW = 16
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"

_Span = tuple[int, int]


class CharacterAlignment:
    """Between an actor's tokens and a critic's over the same text.

    A number at position i of one side is the number of the other side's first token that holds the first character of
    token i, or a part of it. Special tokens are spelt out, so that every token has characters.

    Raises:
        ModelError: the critic's tokenizer cannot tell character offsets (it is no fast tokenizer).
    """

    def __init__(self, actor: PreTrainedTokenizerBase, critic: PreTrainedTokenizerBase) -> None:
        if not critic.is_fast:
            raise ModelError("the critic's tokenizer has no character offsets: use its fast version")
        self.actor = actor
        self.critic = critic

    def batch(self, sequences: Batch) -> Batch:
        """The sequences in the critic's tokens: `prompt_tokens`, `response_tokens` and what names the rows."""
        names = sequences.select(["id", "group"])
        parts = ("prompt_tokens", "response_tokens")
        return names.add({part: [self._encode(row)[0] for row in sequences[part]] for part in parts})

    def to_actor(self, sequences: Batch, values: Sequence[Sequence[float]]) -> list[list[float]]:
        """The critic's numbers, aligned with the actor's response tokens."""
        rows = zip(sequences["response_tokens"], values, strict=True)
        return [_carry(self._encode(tokens)[1], numbers, self._spans(tokens)) for tokens, numbers in rows]

    def to_critic(self, sequences: Batch, columns: Sequence[str]) -> Batch:
        """The sequences in the critic's tokens, with its masks and these columns carried over."""
        there = self.batch(sequences)
        tokens = sequences["response_tokens"]
        spans = [(self._spans(row), self._encode(row)[1]) for row in tokens]
        carried = {
            name: [_carry(ours, row, others) for (ours, others), row in zip(spans, sequences[name], strict=True)]
            for name in ("response_mask", "loss_mask", *columns)
            if name in sequences
        }
        return there.add(carried)

    def _encode(self, tokens: Sequence[int]) -> tuple[list[int], list[_Span]]:
        """The critic's ids for the text of the actor's tokens, and the characters that each is written in."""
        text = spelled(self.actor, tokens)
        encoded = self.critic(text, add_special_tokens=False, return_offsets_mapping=True)
        spans, before = [], 0
        for start, end in encoded["offset_mapping"]:
            # Many tokenizers leave the space that a token begins with out of its offsets: it follows the token before.
            spans.append((min(start, before), max(end, before)))
            before = spans[-1][1]
        return encoded["input_ids"], spans

    def _spans(self, tokens: Sequence[int]) -> list[_Span]:
        """The characters that each of the actor's tokens is written in, whole or in part."""
        whole = spelled(self.actor, tokens)
        spans: list[_Span] = []
        # Only a window is decoded for each token: from the last anchor but one, for a tokenizer may write the first
        # token of a text in another way. An anchor never stands inside a character.
        begin = anchor = passed = known = start = 0  # characters of tokens[:anchor], and of tokens[begin:anchor]
        for index in range(len(tokens)):
            text = spelled(self.actor, tokens[begin : index + 1])
            length = after = passed + len(text) - known
            for sign in reversed(text):  # what is no character yet, but will be
                if sign != _UNFINISHED or whole[after - 1 : after] == _UNFINISHED:
                    break
                after -= 1
            after = max(after, start)
            spans.append((start, after + (length > after)))
            start = after
            if index + 1 - anchor >= _WINDOW and not text.endswith(_UNFINISHED):
                begin, anchor, passed = anchor, index + 1, length
                known = len(spelled(self.actor, tokens[begin:anchor]))
        return spans


def _carry(spans: Sequence[_Span], numbers: Sequence[Any], wanted: Sequence[_Span]) -> list[Any]:
    """For the first character of each wanted span the number of the first token that holds it, else of the last."""
    if not spans:
        return [0 for _ in wanted]
    ends = [end for _, end in spans]
    return [numbers[min(bisect_right(ends, start), len(ends) - 1)] for start, _ in wanted]
