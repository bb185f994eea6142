"""Carrying per-token numbers between two tokenizers by character position."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl.batch import Batch
from verl.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Tokens between two anchors of a text that is decoded piece by piece.
_WINDOW = 16


class CharacterAlignment:
    """Between an actor's tokens and a critic's over the same text.

    A number at position i of one side is the number of the other side's token that holds the first character of
    token i. Special tokens are spelt out, so that every token has characters.

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
        return names.add({part: [self._encode(self._text(row))[0] for row in sequences[part]] for part in parts})

    def to_actor(self, sequences: Batch, values: Sequence[Sequence[float]]) -> list[list[float]]:
        """The critic's numbers, aligned with the actor's response tokens."""
        rows = []
        for tokens, critic_values in zip(sequences["response_tokens"], values, strict=True):
            starts = self._encode(self._text(tokens))[1]
            rows.append(_carry(starts, critic_values, self._starts(tokens)))
        return rows

    def to_critic(self, sequences: Batch, columns: Sequence[str]) -> Batch:
        """The sequences in the critic's tokens, with its masks and these columns carried over."""
        there = self.batch(sequences)
        carried: dict[str, list[list[Any]]] = {}
        for name in ("response_mask", "loss_mask", *columns):
            if name not in sequences:
                continue
            carried[name] = [
                _carry(self._starts(tokens), numbers, self._encode(self._text(tokens))[1])
                for tokens, numbers in zip(sequences["response_tokens"], sequences[name], strict=True)
            ]
        return there.add(carried)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.actor.decode(list(tokens)))

    def _encode(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids and the character at which each begins."""
        encoded = self.critic(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], [start for start, _ in encoded["offset_mapping"]]

    def _starts(self, tokens: Sequence[int]) -> list[int]:
        """The character at which each of the actor's tokens begins. A token that ends inside a character decodes
        to a replacement sign, so starts are kept from running backwards."""
        starts: list[int] = []
        # Only a window is decoded for each token: from the last anchor but one, for a tokenizer may write the first
        # token of a text in another way. An anchor never stands inside a character.
        begin = anchor = passed = known = 0  # characters of tokens[:anchor], and of tokens[begin:anchor]
        for index in range(len(tokens)):
            text = self._text(tokens[begin:index]) if index > begin else ""
            length = passed + len(text) - known
            starts.append(max(length, starts[-1] if starts else 0))
            if index - anchor >= _WINDOW and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                begin, anchor, passed = anchor, index, length
                known = len(self._text(tokens[begin:anchor]))
        return starts


def _carry(starts: Sequence[int], numbers: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
    """For each wanted character the number of the last token that begins at or before it."""
    if not starts:
        return [0 for _ in wanted]
    return [numbers[max(0, bisect_right(starts, place) - 1)] for place in wanted]
