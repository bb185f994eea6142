"""What `Trainer.fit` is given, as a loader."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset

from verl.data.files import is_files
from verl.data.forms import records_of
from verl.data.loader import PromptLoader
from verl.data.offline import OfflineDatasetLoader
from verl.data.prefetch import Loader, Prefetch, ahead
from verl.data.prompts import PromptDataset, load_prompts, stream_prompts
from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.trainer.trainer import Trainer


def as_loader(given: Any, batch_size: int | None, trainer: Trainer) -> Iterable[Any]:
    """Batches for the trainer: those that are given, or with a `batch_size` those of the rows that are.

    Raises:
        ConfigError: rows without `batch_size`; or with it, what has batches already, or several tasks.
    """
    is_rows = isinstance(given, Dataset | PromptDataset | Mapping) or hasattr(given, "column_names")
    is_rows = is_rows or is_files(given) or records_of(given) is not None
    if not is_rows and not isinstance(given, Iterable):
        raise ConfigError(f"Trainer.fit goes over batches of prompts, or rows with batch_size=N, not {given!r}")
    if batch_size is None:
        if is_rows:
            raise ConfigError(
                f"fit over the rows of a {type(given).__name__} needs their number in a step: batch_size=N"
            )
        return _Repeated(given) if isinstance(given, DataLoader) else given
    if isinstance(given, Loader | DataLoader):
        raise ConfigError(f"a {type(given).__name__} has batches of its own size: leave batch_size out")
    seed = trainer.actor.plan.seed
    if not trainer.task.algorithm.online:
        return OfflineDatasetLoader(given, trainer.actor.tokenizer, batch_size=batch_size, seed=seed)
    if not is_files(given) and not hasattr(given, "__len__"):
        return Prefetch(PromptLoader(stream_prompts(given), batch_size))
    return _Passes(given if isinstance(given, PromptDataset) else load_prompts(given), batch_size, seed)


def one_pass(loader: Any) -> int:
    """Steps of one pass over the data.

    Raises:
        ConfigError: they have no length.
    """
    if not hasattr(loader, "__len__"):
        raise ConfigError("the data have no length: say how many steps, fit(data, steps)")
    return math.ceil(len(loader) / (loader.batch_size if isinstance(loader, OfflineDatasetLoader) else 1))


class _Passes(Prefetch):
    """Batches of prompts without end, read ahead; its length is that of one pass."""

    def __init__(self, rows: PromptDataset, batch_size: int, seed: int) -> None:
        super().__init__(PromptLoader(rows, batch_size, seed=seed))
        self._batches = math.ceil(len(rows) / batch_size)

    def __len__(self) -> int:
        return self._batches


class _Repeated:
    """A `DataLoader`, epoch after epoch."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        while True:
            batch = None
            for batch in ahead(iter(self._loader)):
                yield batch
            if batch is None:
                return
