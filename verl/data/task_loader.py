"""Prompts of several tasks, mixed by their shares; the column `task` says which one a row is of."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import tee
from pathlib import Path
from typing import Any

import numpy as np

from verl._base.checked import checked
from verl._base.names import check_known
from verl._base.record import Count, Weights
from verl.batch import Batch
from verl.data.cursor import Resumable, hashed, saved_count
from verl.data.loader import PromptLoader
from verl.data.prompts import PromptDataset, PromptStream, load_prompts, stream_prompts
from verl.errors import ConfigError, DataError

#: Names the task of a row.
COLUMN = "task"
_END = object()


class TaskLoader(Iterator[dict[str, Batch]]):
    """Batches without end, each a mapping of tasks to their prompts.

    Of `batch_size` prompts, a task's expected number is its share; in each batch it is that, rounded up or down, by a
    draw that depends on the seed and the number of the batch alone (systematic sampling, Madow 1944).

    Args:
        sources: by task, loaders that give batches of any size: `PromptLoader`, `OfflineDatasetLoader`.
        shares: relative to each other; None: equal.
        batch_size: prompts of all tasks together.

    Raises:
        ConfigError: there is no task, a share is negative or of no task, or `batch_size` is below 1.
    """

    @checked
    def __init__(
        self, sources: Mapping[str, Any], shares: Weights | None = None, *, batch_size: Count, seed: int = 0
    ) -> None:
        if not sources:
            raise ConfigError("TaskLoader.sources: a batch has prompts of at least 1 task, not of none")
        streams = [
            data for source in sources.values() if isinstance(data := getattr(source, "data", None), PromptStream)
        ]
        if len({id(stream.source) for stream in streams}) < len(streams):
            raise ConfigError("two tasks read one iterable, rows of which may reach one alone: use get_dataloader")
        self.sources, self.batch_size, self.seed = dict(sources), batch_size, seed
        self.batches = 0
        self.draws = dict.fromkeys(self.sources, 0)
        self.shares = dict.fromkeys(self.sources, 1.0 / len(self.sources))
        if shares is not None:
            self.set_shares(shares)

    @checked
    def set_shares(self, shares: Weights) -> None:
        """Draw the batches from now on by these shares; a task that is not named keeps its share, and the named ones
        have the rest.

        Raises:
            ConfigError: a share is negative, not finite, or of no task; or all are 0.
        """
        check_known("a share is given to a task that is not there,", shares, self.sources)
        self.shares = rescaled(self.shares, shares)

    def __len__(self) -> int:
        """Batches until as many prompts have been drawn as the data have, without streams."""
        data = (getattr(source, "data", ()) for source in self.sources.values())
        return -(-sum(len(rows) for rows in data if hasattr(rows, "__len__")) // self.batch_size)

    def __next__(self) -> dict[str, Batch]:
        counts = self.counts()
        self.batches += 1
        return {name: self.take(name, count) for name, count in counts.items() if count}

    def counts(self) -> dict[str, int]:
        """Prompts of each task in the next batch."""
        start = hashed(self.seed, self.batches) / 2**64
        ends = np.cumsum([share * self.batch_size for share in self.shares.values()])
        ends[-1] = self.batch_size  # whatever the sum rounds to
        marks = [0, *np.floor(ends + start).astype(int).tolist()]
        return {name: marks[number + 1] - marks[number] for number, name in enumerate(self.shares)}

    def take(self, name: str, count: int) -> Batch:
        """The next prompts of one task; `id` and `group` begin with its name."""
        batch: Batch = self.sources[name].take(count)
        names = {column: [f"{name}.{old}" for old in batch[column]] for column in ("id", "group")}
        return batch.drop(names).add(names)

    def draw(self, name: str) -> Batch:
        """One task's part of a batch, for tasks that are not trained together: its share, rounded by a draw, at least
        1."""
        start = hashed(self.seed, self.draws[name]) / 2**64
        self.draws[name] += 1
        return self.take(name, max(1, math.floor(self.shares[name] * self.batch_size + start)))

    def state_dict(self) -> dict[str, Any]:
        """The position in all data, as JSON; shares are what they are set to."""
        tasks = {name: {"draws": self.draws[name], "data": each.state_dict()} for name, each in self.sources.items()}
        return {"batches": self.batches, "tasks": tasks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position from `state_dict`.

        Raises:
            DataError: it is of other tasks, or of other data of one.
        """
        saved = state.get("tasks")
        if not isinstance(saved, Mapping) or saved.keys() != self.sources.keys():
            tasks = sorted(saved) if isinstance(saved, Mapping) else "none"
            raise DataError(f"the saved place is of the tasks {tasks}, these are {sorted(self.sources)}")
        for name, source in self.sources.items():
            source.load_state_dict(saved[name]["data"])
            self.draws[name] = saved_count(saved[name], "draws")
        self.batches = saved_count(state, "batches")


class MixedLoader(Resumable):
    """Batches without end of the rows of several data sets, each by its share: a `TaskLoader` of one task.

    Args:
        data: by a name of your choice: what `load_prompts` takes, or a loader (`PromptLoader`, `OfflineDatasetLoader`).
        shares: relative to each other; None: by their rows.
        batch_size: rows (of recorded responses: groups) of a batch.
        **form: of the prompts, see `load_prompts`.
    """

    @checked
    def __init__(
        self,
        data: Mapping[str, Any],
        shares: Mapping[str, float] | None = None,
        *,
        batch_size: Count,
        seed: int = 0,
        **form: Any,
    ) -> None:
        loaders = {name for name, one in data.items() if hasattr(one, "take") and hasattr(one, "__next__")}
        sources = {name: one if name in loaders else _prompts(one, form) for name, one in data.items()}
        self._walk = self.mixture = _mixture(sources, shares, batch_size, seed)

    def __len__(self) -> int:
        return len(self.mixture)

    def __next__(self) -> Batch:
        return Batch.concat(next(self.mixture).values())


@checked
def get_dataloader(
    dataset_path: Any,
    task_weights: Mapping[str, float] | None = None,
    batch_size: Count = 8,
    *,
    seed: int = 0,
    shuffle: bool | None = None,
    **form: Any,
) -> TaskLoader:
    """A `TaskLoader` over rows that name their task in the column `task`.

    Args:
        dataset_path: what `load_prompts` takes; an iterable without a length (`stream_prompts`), which is read once for
            all tasks; or a mapping of tasks to such data, whose rows need no column.
        task_weights: the tasks and their shares of the prompts; None: the tasks in the data, by their rows.
        batch_size: prompts of all tasks together.
        **form: of the prompts, see `load_prompts`.

    Raises:
        DataError: a row names no task, or one without a weight; or there are no rows.
    """
    if isinstance(dataset_path, Mapping) and not {"task", "path"} & dataset_path.keys():
        data = {name: _prompts(rows, form) for name, rows in dataset_path.items()}
    else:
        data = dict(_split(_prompts(dataset_path, form), task_weights))
    return _mixture(data, task_weights, batch_size, seed, shuffle)


def _mixture(
    data: Mapping[str, Any], shares: Mapping[str, float] | None, batch_size: int, seed: int, shuffle: bool | None = None
) -> TaskLoader:
    """Prompts, or loaders, by name; without shares by their rows."""
    sources = {
        name: PromptLoader(one, 1, seed=seed, shuffle=shuffle) if isinstance(one, PromptDataset | PromptStream) else one
        for name, one in read_once(data).items()
    }
    if not shares:
        rows = {name: getattr(source, "data", source) for name, source in sources.items()}
        shares = {name: len(of) if hasattr(of, "__len__") else 1 for name, of in rows.items()}
    return TaskLoader(sources, shares, batch_size=batch_size, seed=seed)


def _prompts(source: Any, form: Mapping[str, Any]) -> PromptDataset | PromptStream:
    has_length = isinstance(source, str | Path | Mapping) or (
        hasattr(source, "__len__") and hasattr(source, "__getitem__")
    )
    return load_prompts(source, **form) if has_length else stream_prompts(source, **form)


def _split(
    data: PromptDataset | PromptStream, weights: Mapping[str, float] | None
) -> Mapping[str, PromptDataset | PromptStream]:
    if isinstance(data, PromptDataset):
        present = [name for name in dict.fromkeys(data.batch[COLUMN]) if name] if COLUMN in data.batch else []
        return {
            n: PromptDataset(rows, f"{data.name}, task {n}")
            for n, rows in by_task(data.batch, [*(weights or present)]).items()
        }
    if not weights:
        raise ConfigError("the tasks of a stream are not known before it is read: give task_weights={TASK: SHARE, ...}")

    def only(name: str, row: Batch, number: int) -> Batch:
        return row if name in by_task(row, [*weights]) else row.slice(0, 0)

    return {name: replace(data, name=f"{data.name}, task {name}", prepare=partial(only, name)) for name in weights}


def rescaled(shares: Mapping[str, float], changed: Mapping[str, float]) -> dict[str, float]:
    """Shares, summing to one, of which some are replaced: the others keep theirs.

    Raises:
        ConfigError: nothing is left to share.
    """
    total = sum(shares.values())
    left = 1.0 - sum(share / total for name, share in shares.items() if name not in changed)
    named = sum(changed.values())
    if named <= 0 and left > 0:
        raise ConfigError(f"the shares of {', '.join(changed)} are all 0: give one of them more")
    return {name: left * changed[name] / named if name in changed else share / total for name, share in shares.items()}


def by_task(rows: Any, names: Sequence[str]) -> dict[str, Any]:
    """The rows of each task, in their order; tasks without rows are left out.

    Args:
        rows: a `Batch` with a column `task`, mappings that have such a key, or a mapping of tasks to rows in any form.
        names: the tasks there are.

    Raises:
        DataError: a row names no task, or an unknown one.
    """
    tasks: list[Any]
    is_split = isinstance(rows, Mapping)
    if is_split:
        tasks = [*rows]
    elif isinstance(rows, Batch):
        tasks = rows[COLUMN] if COLUMN in rows else [None] * len(rows)
    else:
        rows = list(rows)
        tasks = [row.get(COLUMN) if isinstance(row, Mapping) else None for row in rows]
    chosen: dict[str, list[int]] = {}
    for number, name in enumerate(tasks):
        where = "the prompts" if is_split else f"row {number}"
        if name is None:
            raise DataError(f"{where} names no task: of several tasks, each row says its own in the column '{COLUMN}'")
        check_known(f"{where}: there is no task", [name], names, DataError)
        chosen.setdefault(name, []).append(number)
    if is_split:
        return {name: rows[name] for name in names if name in rows}
    split = {name: chosen[name] for name in names if name in chosen}
    if not isinstance(rows, Batch):
        return {name: [rows[number] for number in numbers] for name, numbers in split.items()}
    parts = {name: rows.take(numbers) for name, numbers in split.items()}
    # Columns that only other tasks' rows have are null all through.
    return {
        name: part.select([column for column in part.columns if part.arrow(column).null_count < len(part)])
        for name, part in parts.items()
    }


def read_once(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same data, but a source that several of the streams have is read once for all of them. Iterators over one
    source may share a cursor, so that each row would reach one of them alone."""
    counts = Counter(id(stream.source) for stream in data.values() if isinstance(stream, PromptStream))
    shared: dict[int, tuple[list[_SharedSource], threading.Lock]] = {}
    streams = dict(data)
    for name, stream in data.items():
        if isinstance(stream, PromptStream) and counts[id(stream.source)] > 1:
            readers = shared.setdefault(id(stream.source), ([], threading.Lock()))
            streams[name] = replace(stream, source=_SharedSource(stream.source, *readers))
    return streams


class _SharedSource:
    """A source as one of its readers has it. What one has read and the others have not waits for them. One that begins
    an epoch lets the present one be read to its end first.

    Attributes:
        epoch: of `present`, its rows from the first that it has not read.
        later: by epoch the rows that another reader has begun before.
    """

    def __init__(self, source: Iterable[Any], readers: list[_SharedSource], lock: threading.Lock) -> None:
        readers.append(self)
        self._source, self._readers, self._lock = source, readers, lock
        self.epoch, self.present = -1, iter(())
        self.later: dict[int, Iterator[Any]] = {}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        with self._lock:
            if self.epoch not in self.later:
                self._begin()
            self.present = rows = self.later.pop(self.epoch)
        while True:
            with self._lock:
                row = next(rows, _END)
            if row is _END:
                return
            yield row

    def _begin(self) -> None:
        for each in self._readers:
            for unread in (each.present, *each.later.values()):
                deque(copy(unread), maxlen=0)
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(self.epoch)
        readers = [each for each in self._readers if each is self or each.epoch < self.epoch]
        for each, rows in zip(readers, tee(self._source, len(readers)), strict=True):
            each.later[self.epoch] = rows
