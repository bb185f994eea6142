"""The tokenizer in a checkpoint, as the policy was trained with it: templates and tokens set in Python are in no other
file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.durable import seal_all

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Its directory in a checkpoint.
FOLDER = "actor/tokenizer"


class TokenizerWriter:
    """Writes a tokenizer's own files into a checkpoint; see `Writer`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._files: Mapping[str, Mapping[str, Any]] = {}

    def begin(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder / FOLDER)
        files = sorted(file for file in (folder / FOLDER).rglob("*") if file.is_file())
        self._files = seal_all(files, folder)

    def end(self, wait: bool) -> Mapping[str, Mapping[str, Any]]:
        return self._files
