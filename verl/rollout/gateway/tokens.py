"""Texts of one episode to tokens, each character once.

Texts that may follow the same tokens (prompts that begin an episode's conversations; what the template writes behind a
reply) share their beginnings, up to the last special token that they have in common: such a token never merges with
others, so that the text before it has the same tokens whatever follows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from verl.data.chat import ChatTokenizer
from verl.data.tokenize import encode_behind


@dataclass
class Piece:
    """A text up to a special token, its tokens, and the pieces that were read behind it."""

    tokens: list[int] = field(default_factory=list)
    behind: dict[str, Piece] = field(default_factory=dict)


class PieceReader:
    """Tokenises texts.

    Attributes:
        characters: how many were tokenised so far.
    """

    def __init__(self, chat: ChatTokenizer) -> None:
        self._chat = chat
        names = sorted(filter(None, chat.added.values()), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self.characters = 0

    def read(self, start: Piece, before: Sequence[int], text: str) -> list[int]:
        """Tokens of a text after `start`; `before` is the last token before it, or none.

        It is cut after its special tokens, and each piece is looked up in the tree of those read before.
        """
        cuts = [0, *(match.end() for match in self._special.finditer(text)), len(text)]
        pieces = [text[begin:end] for begin, end in pairwise(cuts) if end > begin]
        tokens, piece_before, known = list[int](), start, 0
        while known < len(pieces) and pieces[known] in piece_before.behind:
            piece_before = piece_before.behind[pieces[known]]
            tokens += piece_before.tokens
            known += 1
        rest = "".join(pieces[known:])
        if rest in piece_before.behind:
            tokens += piece_before.behind[rest].tokens
        elif rest:
            self.characters += len(rest)
            new = encode_behind(self._chat, (tokens or list(before))[-1:], rest)
            tokens += new
            for piece, part in self._parts(pieces[known:], new):
                piece_before = piece_before.behind.setdefault(piece, Piece(part))
        return tokens

    def _parts(self, pieces: list[str], tokens: list[int]) -> list[tuple[str, list[int]]]:
        """Each piece with its tokens; one piece, if the tokenizer splits the text in another way."""
        ends = [position + 1 for position, token in enumerate(tokens) if token in self._chat.added]
        if not ends or ends[-1] < len(tokens):
            ends.append(len(tokens))
        if len(ends) != len(pieces):
            return [("".join(pieces), tokens)]
        return [(piece, tokens[begin:end]) for piece, begin, end in zip(pieces, [0, *ends[:-1]], ends, strict=True)]
