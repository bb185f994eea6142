"""Pass after pass over what `Trainer.fit` is given: rows, or a `DataLoader`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from verl.data.loader import PromptLoader
from verl.data.prefetch import ahead
from verl.data.prompts import PromptDataset


class PromptPasses(PromptLoader):
    """Batches of prompts without end; its length is that of one pass."""

    def __init__(self, rows: PromptDataset, batch_size: int, seed: int) -> None:
        super().__init__(rows, batch_size, seed=seed)
        self._batches = math.ceil(len(rows) / batch_size)

    def __len__(self) -> int:
        return self._batches


class RepeatedLoader:
    """A `DataLoader`, epoch after epoch."""

    def __init__(self, loader: DataLoader[Any], prepare: Callable[[Any], Any], seconds: float) -> None:
        self._loader, self._prepare, self._seconds = loader, prepare, seconds

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        while True:
            batch = None
            for batch in ahead(iter(self._loader), self._prepare, self._seconds):
                yield batch
            if batch is None:
                return
