"""Batches of prompts without end, in an order that is a function of seed and epoch, from an exact cursor."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from verl.batch import Batch
from verl.checked import checked
from verl.data.pools import PoolOptions, Pools
from verl.data.prefetch import RowsAhead
from verl.data.prompts import PromptDataset, PromptStream
from verl.errors import ConfigError, DamagedCheckpointError, DataError
from verl.record import Count

logger = logging.getLogger(__name__)


def permutation(size: int, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The order of `[size]` rows in an epoch: sorted by a hash (SplitMix64) of seed, epoch and row, ties by row."""
    start = _mix(_mix(np.array([seed & (2**64 - 1)], np.uint64)) ^ np.uint64(epoch))
    return np.argsort(_mix(start + np.arange(size, dtype=np.uint64)), kind="stable")


def hashed(seed: int, number: int) -> int:
    """64 random bits that are a function of both."""
    return int(_mix(_mix(np.array([seed & (2**64 - 1)], np.uint64)) ^ np.uint64(number))[0])


def saved_count(state: Mapping[str, Any], key: str) -> int:
    """A number of a saved position.

    Raises:
        DamagedCheckpointError: it is none.
    """
    count = state.get(key)
    if type(count) is not int or not 0 <= count < 2**53:
        raise DamagedCheckpointError(f"{key} of the saved position is {count!r}")
    return count


def _mix(x: Any) -> Any:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Cursor:
    """A position, (epoch, row), in an endless pass over `size` rows, epoch after epoch.

    Args:
        name: what the data are called in errors.
        data: what identifies the data, with their `digest`; saved with the position.
    """

    def __init__(self, size: int, *, seed: int, shuffle: bool, name: str, data: Mapping[str, Any]) -> None:
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self.name, self.identity = name, {**data, "seed": seed, "shuffle": shuffle}
        self.epoch = self.position = 0
        self._order: tuple[int, list[int]] | None = None

    def take(self, count: int) -> list[tuple[int, int]]:
        """The next `count` visits as (epoch, row); every row once an epoch."""
        visits: list[tuple[int, int]] = []
        while len(visits) < count:
            rows = self._rows()[self.position : self.position + count - len(visits)]
            visits += [(self.epoch, row) for row in rows]
            self.position += len(rows)
            if self.position == self.size:
                self.epoch, self.position = self.epoch + 1, 0
        return visits

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, **self.identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            DataError: the state belongs to other data, or to another seed or order.
            DamagedCheckpointError: it is no position.
        """
        for key, mine in self.identity.items():
            if key == "digest" and key not in state:
                logger.warning(
                    "the saved place has no digest: whether the data %s are the same is not known", self.name
                )
            elif state.get(key) != mine:
                raise DataError(
                    f"the saved place belongs to other data than {self.name}: {key} was {state.get(key)}, is {mine}. "
                    "Give the same data and seed, or start anew (--fresh)"
                )
        epoch, position = saved_count(state, "epoch"), saved_count(state, "position")
        if position >= self.size:
            raise DamagedCheckpointError(f"row {position} of epoch {epoch} is not in {self.name}")
        self.epoch, self.position = epoch, position

    def _rows(self) -> list[int]:
        if self._order is None or self._order[0] != self.epoch:
            self._order = (self.epoch, self.permutation() if self.shuffle else list(range(self.size)))
        return self._order[1]

    def permutation(self) -> list[int]:
        """The order of the rows in this epoch."""
        order: list[int] = permutation(self.size, self.seed, self.epoch).tolist()
        return order


class PromptLoader:
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
        if isinstance(data, PromptStream) and shuffle:
            raise ConfigError(f"{data.name} is a stream, which is not shuffled here: shuffle it at its source")
        self.data, self.batch_size = data, batch_size
        #: None: every prompt is drawn once an epoch.
        self.pools: Pools | None = None
        self._walk: _DatasetWalk | _StreamWalk
        if isinstance(data, PromptStream):
            if pools is not None:
                raise ConfigError(
                    f"{data.name} is a stream, whose prompts are not drawn again: leave pools out, or use load_prompts"
                )
            self._walk = _StreamWalk(data)
            return
        if pools is not None:
            self.pools = Pools(PoolOptions.of(pools, "pools"), len(data), task)
        self._walk = _DatasetWalk(data, seed, shuffle is not False, self.pools)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self.take(self.batch_size)

    def take(self, count: int) -> Batch:
        """The next `count` prompts, as `next` would give them."""
        visits, batch = self._walk.visit(count)
        ids = [f"e{epoch}.{row}" for epoch, row in visits]
        return batch.add({"id": ids, "group": ids})

    def read_ahead(self) -> None:
        """From now on read as many rows of a stream as were taken last, while these are used."""
        if isinstance(self._walk, _StreamWalk):
            self._walk.reads_ahead = True

    def note(self, scores: Mapping[str, Sequence[float | None]]) -> None:
        """Tell how the samples of drawn prompts scored, by the prompts' `group`; others are none of this."""
        assert self.pools is not None
        for group, of_samples in scores.items():
            if visit := re.fullmatch(r"e(\d+)\.(\d+)", group):
                self.pools.note(int(visit[1]), int(visit[2]), of_samples)

    def state_dict(self) -> dict[str, Any]:
        """The position of the next prompt, as JSON."""
        return self._walk.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a position from `state_dict`.

        Raises:
            DataError: the state belongs to other prompts, or to another seed or order.
        """
        self._walk.load_state_dict(state)


class _DatasetWalk(Cursor):
    def __init__(self, data: PromptDataset, seed: int, shuffle: bool, pools: Pools | None) -> None:
        identity: dict[str, Any] = {"rows": len(data), "digest": data.fingerprint()}
        if pools is not None:
            identity["pools"] = pools.options.model_dump()
        super().__init__(len(data), seed=seed, shuffle=shuffle, name=data.name, data=identity)
        self.data, self.pools = data, pools

    def visit(self, count: int) -> tuple[list[tuple[int, int]], Batch]:
        visits: list[tuple[int, int]] = []
        while len(visits) < count:
            visits += filter(self._is_drawn, self.take(count - len(visits)))
        return visits, self.data.take([row for _, row in visits])

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | ({} if self.pools is None else {"pooled": self.pools.state_dict()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.pools is None and "pools" in state:
            raise DataError(f"the saved place in {self.name} was drawn with pools ({state['pools']}): give the same")
        super().load_state_dict(state)
        if self.pools is not None:
            self.pools.load_state_dict(state.get("pooled"))

    def _is_drawn(self, visit: tuple[int, int]) -> bool:
        chance = 1.0 if self.pools is None else self.pools.chance(*visit)
        epoch, row = visit
        return chance == 1 or hashed(hashed(self.seed, epoch), row) < chance * 2**64


class _StreamWalk:
    def __init__(self, data: PromptStream) -> None:
        self.data = data
        self.epoch = self.position = 0
        self._rows: RowsAhead | None = None
        self._mark: Any = None  # of the last row
        self.reads_ahead = False

    def visit(self, count: int) -> tuple[list[tuple[int, int]], Batch]:
        visits: list[tuple[int, int]] = []
        rows: list[dict[str, Any]] = []
        barren = 0
        while len(rows) < count:
            if self._rows is None:
                self._rows = RowsAhead(self.data.marked_rows(self.epoch, self.position, self._mark))
            number, row, mark = self._rows.next((-1, {}, None))
            if row:
                visits.append((self.epoch, number))
                rows.append(row)
                self.position, self._mark, barren = number + 1, mark, 0
                continue
            barren += 1
            if barren == 2:
                raise DataError(
                    f"{self.data.name} gives no prompts: it is empty, can be read only once, or all are dropped"
                )
            self.epoch, self.position, self._mark, self._rows = self.epoch + 1, 0, None, None
        if self._rows is not None and self.reads_ahead:
            self._rows.read(count)
        return visits, Batch.from_rows(rows)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"epoch": self.epoch, "position": self.position, "stream": True}
        try:
            json.dumps(self._mark, allow_nan=False)
        except (TypeError, ValueError):  # a state that JSON cannot hold: its rows are skipped
            return state
        return state if self._mark is None else {**state, "mark": self._mark}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state.get("stream"):
            raise DataError(f"the saved place belongs to a data set with a length, {self.data.name} is a stream")
        epoch, position = saved_count(state, "epoch"), saved_count(state, "position")
        if self._rows is not None:
            self._rows.close()
        self.epoch, self.position, self._mark, self._rows = epoch, position, state.get("mark"), None
