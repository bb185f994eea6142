"""The settings of `verl.data.pools`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from verl.record import Number, Record, result, wrong

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
        """`solved_at` and `failed_at` of a task; 1 and 0 where numbers are by task and it has none."""
        numbers = {"solved_at": 1.0, "failed_at": 0.0}
        for key, usual in numbers.items():
            bound = getattr(self, key)
            numbers[key] = bound.get(task, usual) if isinstance(bound, dict) else bound
        return numbers["solved_at"], numbers["failed_at"]
