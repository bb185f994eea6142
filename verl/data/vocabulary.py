"""Which tokenizer the token ids of a batch are of: a column names the vocabulary, this process knows the tokenizer."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from verl.batch import Batch
from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_tokenizers: WeakValueDictionary[str, Any] = WeakValueDictionary()
#: Tokenizer -> its size when it was looked at, and the id of its vocabulary then.
_ids: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()


def vocabulary_id(tokenizer: PreTrainedTokenizerBase) -> str:
    """Sixteen hex digits over the vocabulary, by which `tokenizer_of` finds this tokenizer from now on."""
    size, vocabulary = _ids.get(tokenizer, (-1, ""))
    if size != len(tokenizer):
        content = json.dumps(tokenizer.get_vocab(), sort_keys=True).encode()
        vocabulary = hashlib.sha256(content).hexdigest()[:16]
        _ids[tokenizer] = (len(tokenizer), vocabulary)
    _tokenizers[vocabulary] = tokenizer
    return vocabulary


def tokenizer_of(sequences: Batch) -> PreTrainedTokenizerBase | None:
    """The tokenizer that the column `tokenizer` names; None: there is no such column, or it is not of this process.

    Raises:
        DataError: the rows are of several tokenizers.
    """
    named = set(sequences["tokenizer"]) if "tokenizer" in sequences else set()
    if len(named) > 1:
        raise DataError(f"the sequences are of {len(named)} tokenizers: give those of one at a time")
    return _tokenizers.get(named.pop() or "") if named else None
