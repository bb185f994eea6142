"""What asynchronous training starts and trains next: a state machine without a clock, a process or a tensor.

The staleness of a group of samples is the number of training steps between the one after which its rollout began and
the one that trains it. A group that began after step b is due by step b + S (S: `max_staleness`; the step taken at
version v is step v). Two rules keep every group to that however long a rollout takes:

- no more than (S + 1) * groups groups are untrained at a time;
- a step takes the oldest groups that are ready, and waits until what it leaves can still be trained in time: none
  is due by this step, and no more than (k + 1) * groups by the k-th step after the next one, for each k.

(At k = S - 1 and later the second rule follows from the first.) A wait always ends: once all that was begun is ready,
the oldest groups of all are those the step takes.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from verl.errors import ConfigError, DataError

T = TypeVar("T")


class Schedule(Generic[T]):
    """Groups on their way: accepted, begun, finished, trained; each exactly once, but for those that were lost.

    Args:
        groups: groups a training step takes.
        max_staleness: see the module; 0 is synchronous training.
    """

    def __init__(self, groups: int, max_staleness: int) -> None:
        if groups < 1 or not 0 <= max_staleness <= 1000:
            raise ConfigError(f"asynchronous: {groups} groups a step, at least 1; staleness {max_staleness}, 0 to 1000")
        self.groups, self.max_staleness = groups, max_staleness
        #: Training steps so far.
        self.version = 0
        #: All groups that are here, finished or not, in the order of acceptance.
        self.untrained: dict[str, None] = {}
        #: Groups that are being sampled, and the step that each began after.
        self.begun: dict[str, int] = {}
        #: Finished groups that wait for their step: the step that each began after, and its samples.
        self.ready: dict[str, tuple[int, T]] = {}

    @property
    def room(self) -> int:
        """How many groups may be accepted now."""
        return (self.max_staleness + 1) * self.groups - len(self.untrained)

    @property
    def unfinished(self) -> list[str]:
        """Groups accepted and not finished, in the order of acceptance."""
        return [group for group in self.untrained if group not in self.ready]

    def accept(self, group: str) -> None:
        """Take a group in.

        Raises:
            DataError: there is no room, or it is here already.
        """
        if group in self.untrained:
            raise DataError(f"group '{group}' is on its way already")
        if self.room < 1:
            raise DataError(f"group '{group}': {len(self.untrained)} groups are untrained, more would grow too old")
        self.untrained[group] = None

    def begin(self) -> str | None:
        """The group whose rollout begins now, under the newest weights; None: no group can begin."""
        group = next((group for group in self.unfinished if group not in self.begun), None)
        if group is not None:
            self.begun[group] = self.version
        return group

    def finish(self, group: str, samples: T) -> None:
        """A group's samples have come.

        Raises:
            DataError: it is not being sampled (it has come before, say).
        """
        began = self.begun.pop(group, None)
        if began is None:
            raise DataError(f"group '{group}' came, and is not being sampled: it would be trained twice")
        self.ready[group] = began, samples

    def lose(self, group: str) -> None:
        """The rollout of a group is lost with its worker: it will begin again, before all others."""
        if self.begun.pop(group, None) is None:
            raise DataError(f"group '{group}' is lost, and was not being sampled")

    @property
    def due(self) -> list[str]:
        """The groups of the next training step, in the order of acceptance. Empty: it cannot be taken, since too few
        are there, or those left could not be trained in time."""
        if len(self.ready) < self.groups:
            return []
        finished = (group for group in self.untrained if group in self.ready)
        oldest = {*sorted(finished, key=lambda group: self.ready[group][0])[: self.groups]}
        left = [began for group, (began, _) in self.ready.items() if group not in oldest] + [*self.begun.values()]
        # Due by the k-th step after the next, v + 1 + k, are groups that began by v + 1 + k - S.
        in_time = all(
            sum(began <= self.version + 1 + k - self.max_staleness for began in left) <= (k + 1) * self.groups
            for k in range(-1, self.max_staleness - 1)
        )
        return [group for group in self.untrained if group in oldest] if in_time else []

    def take(self) -> list[T]:
        """The groups of the next training step, in the order of acceptance.

        Raises:
            DataError: no step is due.
        """
        if not (chosen := self.due):
            raise DataError(f"no step is due: {len(self.ready)} of {self.groups} groups are ready")
        self.version += 1
        for group in chosen:
            del self.untrained[group]
        return [self.ready.pop(group)[1] for group in chosen]

    def restore(self, version: int, waiting: list[str], ready: dict[str, tuple[int, T]]) -> None:
        """Go on from a step: `waiting` begin again; `ready` have their samples, and the step they began after.

        Raises:
            ConfigError: they were on their way under another bound, and by this one would be trained too late.
        """
        begun = [*(began for began, _ in ready.values()), *[version] * len(waiting)]
        due = [began + self.max_staleness for began in begun]
        steps = range(version - 1, version + self.max_staleness + 1)
        if any(sum(one <= step for one in due) > (step + 1 - version) * self.groups for step in steps):
            raise ConfigError(
                f"{len(ready)} finished and {len(waiting)} unfinished groups are on their way, which steps of "
                f"{self.groups} groups with max_staleness={self.max_staleness} cannot train in time: go on with the "
                "batch_size and max_staleness that they were begun with"
            )
        self.version, self.begun, self.ready = version, {}, {**ready}
        self.untrained = dict.fromkeys([*ready, *waiting])
