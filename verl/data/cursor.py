"""An exact position in data that are gone over again and again, in an order that is a function of seed and epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from verl.batch import Batch
from verl.data.pools import Pools
from verl.errors import DamagedCheckpointError, DataError


def permutation(size: int, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The order of `[size]` rows in an epoch: sorted by a hash (SplitMix64) of seed, epoch and row, ties by row."""
    start = np.arange(size, dtype=np.uint64) + np.uint64(hashed(seed, epoch))
    return np.argsort(_mix(start), kind="stable")


def hashed(seed: int, number: int) -> int:
    """64 random bits that are a function of both."""
    return int(_mix(_mix(np.array([seed & (2**64 - 1)], np.uint64)) ^ np.uint64(number))[0])


def saved_count(state: Mapping[str, Any], key: str) -> int:
    """A number of a saved position.

    Raises:
        DamagedCheckpointError: it is not a count.
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
        pools: which rows an epoch leaves out, see `verl.data.pools`; saved with the position. None: none.
    """

    def __init__(
        self, size: int, *, seed: int, shuffle: bool, name: str, data: Mapping[str, Any], pools: Pools | None = None
    ) -> None:
        self.size, self.seed, self.shuffle, self.pools = size, seed, shuffle, pools
        options = {} if pools is None else {"pools": pools.options.model_dump()}
        self.name, self.identity = name, {**data, **options, "seed": seed, "shuffle": shuffle}
        self.epoch = self.position = 0
        self._order: tuple[int, list[int]] | None = None

    def take(self, count: int) -> list[tuple[int, int]]:
        """The next `count` visits as (epoch, row); every row once an epoch, without pools."""
        visits: list[tuple[int, int]] = []
        while len(visits) < count:
            if self._order is None or self._order[0] != self.epoch:
                self._order = (self.epoch, self.permutation() if self.shuffle else list(range(self.size)))
            rows = self._order[1][self.position : self.position + count - len(visits)]
            epoch, pools = self.epoch, self.pools
            visits += [
                (epoch, row)
                for row in rows
                if pools is None or hashed(hashed(self.seed, epoch), row) < pools.chance(epoch, row) * 2**64
            ]
            self.position += len(rows)
            if self.position == self.size:
                self.epoch, self.position = self.epoch + 1, 0
        return visits

    def state_dict(self) -> dict[str, Any]:
        pooled = {} if self.pools is None else {"pooled": self.pools.state_dict()}
        return {"epoch": self.epoch, "position": self.position, **self.identity, **pooled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            DataError: the state belongs to other data, or to another seed, order or pools.
            DamagedCheckpointError: it is no position.
        """
        if self.pools is None and "pools" in state:
            raise DataError(f"the saved place in {self.name} was drawn with pools ({state['pools']}): give the same")
        for key, mine in self.identity.items():
            if state.get(key) != mine:
                raise DataError(
                    f"the saved place belongs to other data than {self.name}: {key} was {state.get(key)}, is {mine}. "
                    "Give the same data and seed, or start anew (--fresh)"
                )
        epoch, position = saved_count(state, "epoch"), saved_count(state, "position")
        if position >= self.size:
            raise DamagedCheckpointError(f"row {position} of epoch {epoch} is not in {self.name}")
        if self.pools is not None:
            self.pools.load_state_dict(state.get("pooled"))
        self.epoch, self.position = epoch, position

    def permutation(self) -> list[int]:
        """The order of the rows in this epoch."""
        return [*permutation(self.size, self.seed, self.epoch).tolist()]


class Resumable(Iterator[Batch]):
    """Batches whose position is the one of a `Cursor`, or of another walk through data."""

    batch_size: int
    #: Rows or groups up to which batches are drawn, the last one as large as what is left; None: without end.
    end: int | None = None
    #: The next ones, this many.
    take: Callable[[int], Batch]
    _walk: Any

    def __next__(self) -> Batch:
        walk, count = self._walk, self.batch_size
        # With pools nobody knows how many are left.
        if self.end is not None and isinstance(walk, Cursor) and walk.pools is None:
            left = self.end - walk.epoch * walk.size - walk.position
            count = min(left, count) if left > 0 else count
        return self.take(count)

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch, as JSON."""
        return dict(self._walk.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position from `state_dict`.

        Raises:
            DataError: the state belongs to other data, or to another seed, order or pools.
        """
        self._walk.load_state_dict(state)
