"""What `Trainer.fit` is given, as a loader."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset

from verl._host.user_calls import UserCode
from verl.data.files import is_files
from verl.data.forms import records_of
from verl.data.loader import PromptLoader, sources_of
from verl.data.prefetch import Loader, Prefetch, RowsAhead, in_time
from verl.data.prompts import PromptDataset, load_prompts, stream_prompts
from verl.data.tokenize import Truncation, to_prompts, tokenize_prompts
from verl.errors import ConfigError, shown

if TYPE_CHECKING:
    from verl.trainer.loop import Loop


logger = logging.getLogger(__name__)


def as_loader(
    data: Any, batch_size: int | None, trainer: Loop, max_prompt_length: int | None, truncation: Truncation
) -> Iterable[Any]:
    """Batches for the trainer: `data` itself if it yields batches; else, with `batch_size`, its rows, batched.

    Args:
        max_prompt_length, truncation: of the rows' prompts, see `PromptTokenizer`.

    Raises:
        ConfigError: rows without `batch_size`; or with it, what has batches already, or several tasks.
    """
    is_rows = isinstance(data, Dataset | PromptDataset | Mapping) or hasattr(data, "column_names")
    is_rows = is_rows or is_files(data) or records_of(data) is not None
    if not is_rows and not isinstance(data, Iterable):
        raise ConfigError(f"Trainer.fit goes over batches of prompts, or rows with batch_size=N, not {shown(data)}")
    if batch_size is None:
        if is_rows:
            raise ConfigError(
                f"fit over the rows of a {type(data).__name__} needs their number in a step: batch_size=N"
            )
        if max_prompt_length is not None:
            raise ConfigError("max_prompt_length is of rows: give them and batch_size=N, not batches")
        return data  # type: ignore[no-any-return]
    if isinstance(data, Loader | DataLoader):
        raise ConfigError(f"a {type(data).__name__} has batches of its own size: leave batch_size out")
    actor, seed = trainer.actor, trainer.actor.plan.seed
    limits: dict[str, Any] = (
        {} if max_prompt_length is None else {"max_prompt_length": max_prompt_length, "truncation": truncation}
    )
    if not trainer.task.algorithm.online:
        from verl.data.offline import OfflineDatasetLoader

        return OfflineDatasetLoader(data, actor.tokenizer, batch_size=batch_size, seed=seed, **limits)
    is_stream = not is_files(data) and not hasattr(data, "__len__")
    rows: Any = stream_prompts(data) if is_stream else data if isinstance(data, PromptDataset) else load_prompts(data)
    if limits:
        rows, counts = tokenize_prompts(rows, actor.tokenizer, tools=actor.tools, **limits)
        for what in (what for what in ("dropped", "truncated") if counts[what]):
            longer = f"longer than {max_prompt_length} tokens"
            logger.warning("%d prompts of %s are %s and were %s", counts[what], rows.name, longer, what)
    return PromptLoader(rows, batch_size) if is_stream else PromptPasses(rows, batch_size, seed=seed)


def one_pass(loader: Any) -> int:
    """Steps of one pass over the data.

    Raises:
        ConfigError: they have no length.
    """
    if not hasattr(loader, "__len__"):
        raise ConfigError("the data have no length: say how many steps, fit(data, steps)")
    from verl.data.offline import OfflineDatasetLoader

    return math.ceil(len(loader) / (loader.batch_size if isinstance(loader, OfflineDatasetLoader) else 1))


def read_ahead(loader: Any, trainer: Loop) -> Any:
    """A loader whose next batch is read and tokenised while a step goes on. Where a
    step decides about the next batch (shares of a scheduler, pools, tasks that are waited for), only rows are read."""
    prepare = partial(prepare_prompts, trainer)
    if isinstance(loader, DataLoader):
        return _repeated(loader, prepare, trainer.limits.deadline)
    if isinstance(loader, Prefetch):
        loader.prepare, loader.seconds = prepare, trainer.limits.deadline
    elif isinstance(loader, Loader):
        sources = sources_of(loader).values()
        is_pooled = any(source.pools is not None for source in sources)
        if not (trainer.needs_previous_step or trainer.mixture.scheduler is not None or is_pooled):
            return Prefetch(loader, prepare, trainer.limits.deadline)
        for source in sources:
            source.reads_ahead = trainer.limits.deadline
    return loader


def next_batch(prompts: Iterator[Any], seconds: float) -> Any:
    """The next batch of whatever the user gave; None: the end. Raises DataError if it is late."""
    with in_time(seconds):
        return UserCode("the prompts").run(seconds, next, prompts, None)


def prepare_prompts(trainer: Loop, batch: Any) -> Any:
    """A batch with the tokens of its prompts."""
    encode = partial(to_prompts, trainer.actor.tokenizer, tools=trainer.actor.tools)
    online = {name for name, task in trainer.tasks.items() if task.algorithm.online}
    if isinstance(batch, Mapping) and batch.keys() <= trainer.tasks.keys():  # of a `TaskLoader`
        return {name: encode(rows) if name in online else rows for name, rows in batch.items()}
    alone = {name for name, task in trainer.tasks.items() if not task.updater.name}
    return encode(batch) if alone & online else batch


class PromptPasses(PromptLoader):
    """Batches of prompts without end; its length is one pass."""

    data: PromptDataset

    def __len__(self) -> int:
        return math.ceil(len(self.data) / self.batch_size)


def _repeated(loader: DataLoader[Any], prepare: Callable[[Any], Any], seconds: float) -> Iterator[Any]:
    """The batches of a `DataLoader`, epoch after epoch."""
    while True:
        batch = None
        for batch in RowsAhead(map(prepare, loader), seconds):
            yield batch
        if batch is None:
            return
