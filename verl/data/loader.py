"""Batches of prompts without end, in an order that is a function of seed and epoch, from an exact cursor."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from verl._base.checked import checked
from verl._base.record import Count
from verl._host.user_calls import DEADLINE
from verl.batch import Batch
from verl.data.cursor import Cursor, Resumable, saved_count
from verl.data.pools import PoolOptions, Pools
from verl.data.prefetch import RowsAhead
from verl.data.prompts import PromptDataset, PromptStream
from verl.errors import ConfigError, DataError


class PromptLoader(Resumable):
    """Batches of `batch_size` prompts without end; `id` and `group` are "e{epoch}.{row}", unique for each visit.

    A batch may reach over the end of an epoch. A stream is read in its own order (`shuffle` must not be True) and
    is resumed by skipping.

    Args:
        pools: draw prompts less of which all samples are solved or all fail, see `verl.data.pools`; `Trainer.fit` tells
            the loader how samples scored (`note`). None: every prompt once an epoch.
        task: whose numbers they go by, where these are by task.
    """

    @checked
    def __init__(
        self,
        data: PromptDataset | PromptStream,
        batch_size: Count,
        *,
        seed: int = 0,
        shuffle: bool | None = None,
        pools: PoolOptions | Mapping[str, Any] | None = None,
        task: str = "",
    ) -> None:
        self.data, self.batch_size = data, batch_size
        #: None: every prompt is drawn once an epoch.
        self.pools: Pools | None = None
        #: Seconds that a stream's next rows may take, which are read while those taken last are used; None: none are.
        self.reads_ahead: float | None = None
        if isinstance(data, PromptStream):
            if shuffle:
                raise ConfigError(f"{data.name} is a stream, which is not shuffled here: shuffle it at its source")
            if pools is not None:
                raise ConfigError(
                    f"{data.name} is a stream, whose prompts are not drawn again: leave pools out, or use load_prompts"
                )
            self._walk = _StreamWalk(data)
        else:
            self.pools = None if pools is None else Pools(PoolOptions.of(pools, "pools"), len(data), task)
            identity = {"rows": len(data), "digest": data.fingerprint()}
            order: dict[str, Any] = {"seed": seed, "shuffle": shuffle is not False, "pools": self.pools}
            self._walk = Cursor(len(data), name=data.name, data=identity, **order)

    def take(self, count: int) -> Batch:
        """The next `count` prompts, as `next` would give them."""
        if isinstance(self.data, PromptDataset):
            visits = self._walk.take(count)
            batch = self.data.batch.take([row for _, row in visits])
        else:
            visits, batch = self._walk.take(count, self.reads_ahead)
        ids = [f"e{epoch}.{row}" for epoch, row in visits]
        return batch.add({"id": ids, "group": ids})

    def note(self, scores: Mapping[str, Sequence[float | None]]) -> None:
        """Tell how the samples of drawn prompts scored, by the prompts' `group`; others are not."""
        assert self.pools is not None
        for group, of_samples in scores.items():
            if visit := re.fullmatch(r"e(\d+)\.(\d+)", group):
                self.pools.note(int(visit[1]), int(visit[2]), of_samples)


class _StreamWalk:
    """A position in a stream of prompts, epoch after epoch."""

    def __init__(self, data: PromptStream) -> None:
        self.data = data
        self.epoch = self.position = 0
        self._rows: RowsAhead | None = None
        self._mark: Any = None  # of the last row

    def take(self, count: int, reads_ahead: float | None) -> tuple[list[tuple[int, int]], Batch]:
        visits: list[tuple[int, int]] = []
        rows: list[dict[str, Any]] = []
        while len(rows) < count:
            if self._rows is None:
                rows_left = self.data.rows(self.epoch, self.position, self._mark)
                self._rows = RowsAhead(rows_left, reads_ahead or DEADLINE)
            number, row, mark = self._rows.next((-1, {}, None))
            if row:
                visits.append((self.epoch, number))
                rows.append(row)
                self.position, self._mark = number + 1, mark
                continue
            if self.position == 0:  # nothing came in a whole epoch
                raise DataError(
                    f"{self.data.name} gives no prompts: it is empty, can be read only once, or all are dropped"
                )
            self.epoch, self.position, self._mark, self._rows = self.epoch + 1, 0, None, None
        if self._rows is not None and reads_ahead:
            self._rows.read(count)
        return visits, Batch.from_rows(rows)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"epoch": self.epoch, "position": self.position, "stream": True}
        try:
            json.dumps(self._mark, allow_nan=False)
        except (TypeError, ValueError):  # a state that JSON cannot hold: its rows are skipped
            return state
        return state if self._mark is None else {**state, "mark": self._mark}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state.get("stream"):
            raise DataError(f"the saved place belongs to a data set with a length, {self.data.name} is a stream")
        epoch, position = saved_count(state, "epoch"), saved_count(state, "position")
        if self._rows is not None:
            self._rows.close()
        self.epoch, self.position, self._mark, self._rows = epoch, position, state.get("mark"), None


def sources_of(loader: Any) -> dict[str, PromptLoader]:
    """The loaders of prompts that a loader draws from, by the first part of their prompts' names."""
    sources = getattr(getattr(loader, "mixture", loader), "sources", None)
    every = sources if isinstance(sources, Mapping) else {"": loader}
    return {name: source for name, source in every.items() if isinstance(source, PromptLoader)}


def note_scores(loader: Any, scores: Mapping[str, Sequence[float | None]]) -> dict[str, int]:
    """Tell a loader's pools how samples scored, by the `group` of their prompts; the sizes of the pools, of several
    tasks by task."""
    sizes: Counter[str] = Counter()
    for name, source in sources_of(loader).items():
        if source.pools is None:
            continue
        source.note({group.removeprefix(f"{name}."): of_samples for group, of_samples in scores.items()})
        for pool, size in source.pools.sizes().items():
            sizes[f"task/{name}/{pool}" if hasattr(loader, "sources") else pool] += size
    return dict(sizes)
