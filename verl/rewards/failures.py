"""How often a user's code (a reward, an episode) may fail before a run ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

_WINDOW, _ENOUGH = 256, 64


@dataclass(eq=False)
class Failures:
    """The failures among the latest 256 samples, and whether any sample has ever succeeded.

    Args:
        most: the share that may fail; 1: all may.
    """

    most: float
    _recent: deque[bool] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _any_worked: bool = False

    def add(self, failed: Iterable[bool]) -> None:
        for one in failed:
            self._recent.append(one)
            self._any_worked |= not one

    @property
    def too_many(self) -> bool:
        """Whether more than the share failed; False below 64 samples."""
        return len(self._recent) >= _ENOUGH and sum(self._recent) / len(self._recent) > self.most

    @property
    def all(self) -> bool:
        """Whether every sample so far has failed, however few: a run that ends so has learned nothing."""
        return bool(self._recent) and not self._any_worked and self.most < 1

    def __str__(self) -> str:
        return f"{sum(self._recent)} of the latest {len(self._recent)} samples"
