"""Token ids as text: one decoder for all that is read, by rewards, tools, guards or people; and which tokenizer the
token ids of a batch are of: a column names the vocabulary, this process knows the tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from verl.errors import DataError

if TYPE_CHECKING:
    from verl.batch import Batch

_tokenizers: WeakValueDictionary[str, Any] = WeakValueDictionary()
#: Tokenizer -> its size when it was looked at, and the id of its vocabulary then.
_ids: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()


def spelled(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens: every special token is spelt out, and no space is "cleaned up"."""
    options = {"clean_up_tokenization_spaces": False, "spaces_between_special_tokens": False}
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, **options))


def behind_thoughts(text: str) -> str:
    """A response without the thoughts that end with `</think>`, whether the prompt or the model began them."""
    return text.rpartition("</think>")[2]


def written_turns(samples: Batch) -> list[list[list[int]]]:
    """The tokens of each row that the policy wrote, turn by turn: a turn ends where something was read. Without
    `response_mask` the policy wrote all tokens."""
    tokens = samples["response_tokens"]
    written = samples["response_mask"] if "response_mask" in samples else [[1] * len(row) for row in tokens]
    if "token_versions" in samples:  # what a grammar forced has no loss, but the policy said it
        versions = zip(written, samples["token_versions"], strict=True)
        written = [mask if of is None else [version >= 0 for version in of] for mask, of in versions]
    return [runs(*row) for row in zip(tokens, written, strict=True)]


def runs(tokens: Sequence[int], marks: Sequence[int]) -> list[list[int]]:
    """The runs of marked tokens."""
    pieces = groupby(zip(tokens, marks, strict=True), key=lambda pair: bool(pair[1]))
    return [[token for token, _ in piece] for is_marked, piece in pieces if is_marked]


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

    def columns(self, samples: Batch) -> dict[str, list[str | None]]:
        """The columns `response` and, where something was read between turns, `last_turn`."""
        turns = [list(map(self, said)) for said in written_turns(samples)]
        columns: dict[str, list[str | None]] = {"response": ["\n".join(filter(None, said)) for said in turns]}
        if any(len(said) > 1 for said in turns):
            columns["last_turn"] = [said[-1] if len(said) > 1 else None for said in turns]
        return columns


def vocabulary_id(tokenizer: Any) -> str:
    """Sixteen hex digits over the vocabulary, by which `tokenizer_of` finds this tokenizer from now on."""
    size, vocabulary = _ids.get(tokenizer, (-1, ""))
    if size != len(tokenizer):
        content = json.dumps(tokenizer.get_vocab(), sort_keys=True).encode()
        vocabulary = hashlib.sha256(content).hexdigest()[:16]
        _ids[tokenizer] = (len(tokenizer), vocabulary)
    _tokenizers[vocabulary] = tokenizer
    return vocabulary


def tokenizer_of(sequences: Batch) -> Any:
    """The tokenizer that the column `tokenizer` names; None: there is no such column, or it is not of this process.

    Raises:
        DataError: the rows are of several tokenizers.
    """
    named = set(sequences["tokenizer"]) if "tokenizer" in sequences else set()
    if len(named) > 1:
        raise DataError(f"the sequences are of {len(named)} tokenizers: give those of one at a time")
    return _tokenizers.get(named.pop() or "") if named else None
