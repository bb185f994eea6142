"""Prompts that teach nothing are drawn less: prompts whose samples are all solved, or all fail.

An epoch looks at every prompt once, in its order, and draws it with a chance:

    1                                      it is in no pool
    1 - (1 - chance) * decay ** passed     it is in the pool `solved` or `failed`, which has that `chance`, and `passed`
                                           epochs have skipped it since it was last drawn

The samples of its last visit decide which pool a prompt is in. A chance is held against a hash of seed, epoch and row:
draws repeat under a seed, and the size of a batch does not change them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field

from verl._base.record import Number, Record, result, wrong
from verl.errors import DamagedCheckpointError

NAMES = ("solved", "failed")
#: Large enough for an epoch to draw something before long.
Chance = Annotated[float, Field(ge=0.01, le=1)]
#: One for all tasks, or by task.
Bound = Number | dict[str, Number]


class PoolOptions(Record):
    """How often prompts are drawn whose samples were all solved, or have all failed."""

    solved: Chance = result(0.25, "chance that an epoch draws a prompt of the pool solved")
    failed: Chance = result(0.25, "the same of the pool failed")
    decay: Annotated[float, Field(ge=0, lt=1)] = result(
        0.5, "factor of what such a chance lacks to 1, each time that an epoch passes a prompt over"
    )
    metric: str = result("reward", "what counts: reward, or a part of it, such as reward/accuracy")
    solved_at: Bound = result(1.0, "a sample with at least this is solved; or {TASK: NUMBER, ...}")
    failed_at: Bound = result(0.0, "a sample with at most this has failed; likewise")

    def _check(self) -> None:
        for task in self.tasks or {""}:
            solved, failed = self.bounds(task)
            if failed >= solved:
                raise wrong("failed_at", f"must be below solved_at ({solved:g}), not {failed:g}")

    @property
    def tasks(self) -> set[str]:
        """Those that have numbers of their own."""
        return {name for bound in (self.solved_at, self.failed_at) if isinstance(bound, dict) for name in bound}

    def bounds(self, task: str) -> tuple[float, float]:
        """`solved_at` and `failed_at` of a task; 1 and 0 for a task that is not among the numbers by task."""
        bounds = ((self.solved_at, 1.0), (self.failed_at, 0.0))
        solved, failed = (bound.get(task, usual) if isinstance(bound, dict) else bound for bound, usual in bounds)
        return solved, failed


class Pools:
    """The pool of each row of a task's prompts, and the epoch in which it was last drawn."""

    def __init__(self, options: PoolOptions, rows: int, task: str = "") -> None:
        self.options, self._rows, self._bounds = options, rows, options.bounds(task)
        self._last: dict[int, tuple[str, int]] = {}

    def chance(self, epoch: int, row: int) -> float:
        """That the epoch draws the row."""
        if row not in self._last:
            return 1.0
        pool, last = self._last[row]
        return float(1 - (1 - getattr(self.options, pool)) * self.options.decay ** max(epoch - last - 1, 0))

    def note(self, epoch: int, row: int, scores: Iterable[float | None]) -> None:
        """The scores of the samples of a row in an epoch; None: not scored. Without any score nothing changes, nor for
        an earlier epoch than the last."""
        present = [score for score in scores if score is not None and math.isfinite(score)]
        if not present or epoch < self._last.get(row, ("", 0))[1]:
            return
        self._last.pop(row, None)
        if min(present) >= self._bounds[0]:
            self._last[row] = ("solved", epoch)
        elif max(present) <= self._bounds[1]:
            self._last[row] = ("failed", epoch)

    def sizes(self) -> dict[str, int]:
        """Rows in each pool, and in none."""
        pools = [pool for pool, _ in self._last.values()]
        return {**{f"pools/{name}": pools.count(name) for name in NAMES}, "pools/none": self._rows - len(pools)}

    def state_dict(self) -> dict[str, Any]:
        """By pool and epoch the rows, as JSON."""
        state: dict[str, dict[str, list[int]]] = {name: {} for name in NAMES}
        for row, (pool, epoch) in sorted(self._last.items()):
            state[pool].setdefault(str(epoch), []).append(row)
        return state

    def load_state_dict(self, state: Any) -> None:
        """Raises DamagedCheckpointError if it is not a state of these rows."""
        try:
            last = {row: (pool, int(epoch)) for pool in NAMES for epoch, rows in state[pool].items() for row in rows}
            if not all(type(row) is int and 0 <= row < self._rows and epoch >= 0 for row, (_, epoch) in last.items()):
                raise ValueError("a row or an epoch that there is not")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedCheckpointError(f"the pools of the saved position: {type(error).__name__}: {error}") from None
        self._last = last
