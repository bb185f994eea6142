"""What asynchronous training starts and trains next: a state machine without a clock, a process or a tensor.

The staleness of a group of samples is the number of training steps between the one after which its rollout began and
the one that trains it. Two rules keep it within `max_staleness` however long a rollout takes:

- no more than (max_staleness + 1) * groups groups are untrained at a time;
- a step waits for the groups that would be too old for the next one, and takes the oldest first.

For if a group that was begun after step v - S (S: the bound) is still untrained at step v, then so are only groups
accepted by then, of which the first rule has let in (v + 1) * groups; v * groups of them have been trained. So
they fit into step v.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from verl.errors import ConfigError, DataError

T = TypeVar("T")


@dataclass(frozen=True)
class Ready(Generic[T]):
    """A finished group: the step its rollout began after, its place in the order of acceptance, what it holds."""

    began: int
    number: int
    samples: T


class Schedule(Generic[T]):
    """Groups on their way: accepted, begun, finished, trained; each exactly once, but for those that were lost.

    Args:
        groups: groups a training step takes.
        max_staleness: see the module; 0 is synchronous training.
    """

    def __init__(self, groups: int, max_staleness: int) -> None:
        if groups < 1 or max_staleness < 0:
            raise ConfigError(f"asynchronous: {groups} groups a step, staleness {max_staleness}: at least 1 and 0")
        self.groups, self.max_staleness = groups, max_staleness
        #: Training steps so far.
        self.version = 0
        self._accepted = 0
        self._numbers: dict[str, int] = {}
        self._waiting: deque[str] = deque()
        self._begun: dict[str, int] = {}
        self._ready: dict[str, Ready[T]] = {}

    @property
    def room(self) -> int:
        """How many groups may be accepted now."""
        return (self.max_staleness + 1) * self.groups - len(self._numbers)

    @property
    def ready(self) -> dict[str, Ready[T]]:
        """Finished groups that wait for their step."""
        return dict(self._ready)

    @property
    def begun(self) -> list[str]:
        """Groups that are being sampled."""
        return sorted(self._begun, key=self._numbers.__getitem__, reverse=True)

    @property
    def unfinished(self) -> list[str]:
        """Groups accepted and not finished, in the order of acceptance."""
        return sorted([*self._waiting, *self._begun], key=self._numbers.__getitem__)

    def accept(self, group: str) -> None:
        """Take a group in.

        Raises:
            DataError: there is no room, or it is here already.
        """
        if group in self._numbers:
            raise DataError(f"group '{group}' is on its way already")
        if self.room < 1:
            raise DataError(f"group '{group}': {len(self._numbers)} groups are untrained, more would grow too old")
        self._numbers[group] = self._accepted
        self._accepted += 1
        self._waiting.append(group)

    def begin(self) -> str | None:
        """The group whose rollout begins now, under the newest weights; None: there is none."""
        if not self._waiting:
            return None
        group = self._waiting.popleft()
        self._begun[group] = self.version
        return group

    def finish(self, group: str, samples: T) -> None:
        """A group's samples have come.

        Raises:
            DataError: it is not being sampled (it has come before, say).
        """
        began = self._begun.pop(group, None)
        if began is None:
            raise DataError(f"group '{group}' came, and is not being sampled: it would be trained twice")
        self._ready[group] = Ready(began, self._numbers[group], samples)

    def lose(self, group: str) -> None:
        """The rollout of a group is gone, with whoever made it: it will begin anew, before all others."""
        if self._begun.pop(group, None) is None:
            raise DataError(f"group '{group}' is lost, and was not being sampled")
        self._waiting.appendleft(group)

    @property
    def due(self) -> bool:
        """Whether a training step can be taken: its groups are there, and none is missing that would grow too old."""
        oldest = self.version - self.max_staleness
        return len(self._ready) >= self.groups and all(began > oldest for began in self._begun.values())

    def take(self) -> list[T]:
        """What the next training step trains on, in the order of acceptance.

        Raises:
            DataError: no step is due.
        """
        if not self.due:
            raise DataError(f"no step is due: {len(self._ready)} of {self.groups} groups are ready")
        chosen = sorted(self._ready, key=lambda group: (self._ready[group].began, self._ready[group].number))
        chosen = sorted(chosen[: self.groups], key=self._numbers.__getitem__)
        for group in chosen:
            del self._numbers[group]
        self.version += 1
        return [self._ready.pop(group).samples for group in chosen]

    def restore(self, version: int, waiting: list[str], ready: dict[str, tuple[int, T]]) -> None:
        """Go on from a step: `waiting` begin anew; `ready` have their samples, and the step they began after."""
        self.version, self._accepted = version, 0
        self._numbers, self._begun, self._ready = {}, {}, {}
        self._waiting = deque(waiting)
        for group in [*ready, *waiting]:
            self._numbers[group] = self._accepted
            self._accepted += 1
        for group, (began, samples) in ready.items():
            self._ready[group] = Ready(began, self._numbers[group], samples)
