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

    def add(self, failed: Iterable[bool]) -> str | None:
        """Add samples. How many of the latest failed, if that is more than the share; None below 64 samples."""
        failed = list(failed)
        self._recent.extend(failed)
        self._any_worked |= not all(failed)
        count, size = sum(self._recent), len(self._recent)
        return f"{count} of the latest {size} samples" if size >= _ENOUGH and count / size > self.most else None

    @property
    def all(self) -> bool:
        """Whether every sample so far has failed, however few: a run that ends so has learned nothing."""
        return bool(self._recent) and not self._any_worked and self.most < 1
