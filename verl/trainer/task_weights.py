"""Weights of several tasks that follow how far each has come."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from verl._base.checked import checked
from verl._base.names import check_logged
from verl._base.record import Count, Share, Weights
from verl.errors import CheckpointError, ConfigError, nearest

logger = logging.getLogger(__name__)

#: Words for a metric of a task's record.
_ALIASES = {"reward_score": "reward/mean", "score": "reward/mean"}
#: A level counts as higher, or lower, from so many standard errors on.
_STANDARD_ERRORS = 3.0


class DynamicTaskWeightScheduler:
    """Gives the weight of tasks that have converged to those that still learn or have fallen behind.

    A task's level is the mean of its metric over its latest `patience / 2` steps. It gains when its level is above the
    best one by more than noise: three standard errors, from the differences of successive values, and at least 0.1 %.
    It has converged when it has not gained for `patience` steps and is no further below its best than that; one that
    has fallen is behind. At each step the weights go part of the way, a tenth at a `patience` of 100, to where
    converged tasks have `min_weight` and the others share the rest in the ratio of their initial weights; with all
    converged, to the initial weights.

    Args:
        initial_weights: of tasks, in any unit; tasks that are not named keep their share.
        metric_key: the metric of a task that is to be high; "reward_score" is its mean reward.
        patience: training steps.
        min_weight: what a weight never falls below, as a share of 1.

    Attributes:
        weights: they sum to 1.

    Raises:
        ConfigError: no task, a weight that is negative or not finite, or a floor that leaves nothing to give.
    """

    @checked
    def __init__(
        self, initial_weights: Weights, metric_key: str = "reward_score", patience: Count = 500, min_weight: Share = 0.1
    ) -> None:
        if not sum(initial_weights.values()):
            raise ConfigError("DynamicTaskWeightScheduler.initial_weights: are all 0: give one of them more")
        if not 0 <= min_weight * len(initial_weights) <= 1:
            raise ConfigError(
                f"min_weight={min_weight} for each of {len(initial_weights)} tasks must come to between 0 and 1"
            )
        self.metric_key, self.patience, self.min_weight = metric_key, patience, min_weight
        total = sum(initial_weights.values())
        self._initial = {name: weight / total for name, weight in initial_weights.items()}
        self.weights: dict[str, float] = self._floored(self._initial)
        self._unseen = True  # until the metric has been asked for in vain, which is said once
        self._levels = {name: _Level(max(1, patience // 2)) for name in self._initial}

    def update(self, step: int, metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """The weights after a step, from the metrics of the tasks that took part in it."""
        for name, level in self._levels.items():
            logged = metrics.get(name, {})
            value = logged.get(self.metric_key, logged.get(_ALIASES.get(self.metric_key, "")))
            if value is not None and math.isfinite(value):
                level.add(step, value)
            elif self._unseen and logged.keys() - {"share"}:  # which every task has
                self._unseen = False
                known = {**logged, **_ALIASES}
                check_logged(f"the scheduler has not seen, of task '{name}',", self.metric_key, known)
                near = nearest(self.metric_key, [*known])
                logger.warning("the scheduler has not seen '%s' of task '%s': %s", self.metric_key, name, near)
        levels = self._levels
        learning = {name: w for name, w in self._initial.items() if not levels[name].has_converged(step, self.patience)}
        goal = self._floored(learning if sum(learning.values()) else self._initial)
        rate = 1 / max(1, self.patience // 10)
        self.weights = {name: weight + rate * (goal[name] - weight) for name, weight in self.weights.items()}
        return self.weights

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, as JSON."""
        return {"weights": dict(self.weights), "levels": {name: dict(vars(of)) for name, of in self._levels.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the state is of other tasks, or another patience."""
        levels = state["levels"]
        window = next(iter(self._levels.values())).window
        if levels.keys() != self._levels.keys() or any(saved["window"] != window for saved in levels.values()):
            raise CheckpointError("the saved weights are of other tasks or another patience than the scheduler's")
        self.weights = {name: float(state["weights"][name]) for name in self._levels}
        self._levels = {name: TypeAdapter(_Level).validate_python(levels[name]) for name in self._levels}

    def _floored(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Weights that sum to 1, in the ratio of these but for tasks that would be below the floor."""
        low: set[str] = {name for name in self._initial if not weights.get(name)}
        while True:
            left = 1 - self.min_weight * len(low)
            total = sum(weight for name, weight in weights.items() if name not in low)
            scaled = {name: left * weight / total for name, weight in weights.items() if name not in low}
            more = {name for name, weight in scaled.items() if weight < self.min_weight}
            if not more or len(more) == len(scaled):
                break
            low |= more
        floored = {name: scaled.get(name, self.min_weight) for name in self._initial}
        total = sum(floored.values())  # 1, but for rounding
        return {name: weight / total for name, weight in floored.items()}


@dataclass
class _Level:
    """The level of a task's metric."""

    window: int
    values: list[float] = field(default_factory=list)
    best: float | None = None
    gained: int = 0
    changes: int = 0
    squares: float = 0.0

    def add(self, step: int, value: float) -> None:
        if self.values:
            self.changes, self.squares = self.changes + 1, self.squares + (value - self.values[-1]) ** 2
        self.values = [*self.values, value][-self.window :]
        if len(self.values) == self.window:
            now, noise = self._now()
            if self.best is None or now > self.best + noise:
                self.best, self.gained = now, step

    def has_converged(self, step: int, patience: int) -> bool:
        """Whether it has neither gained for that many steps nor fallen."""
        if self.best is None or step - self.gained < patience:
            return False
        now, noise = self._now()
        return now >= self.best - noise

    def _now(self) -> tuple[float, float]:
        """The level, and how much of it may be noise."""
        error = math.sqrt(self.squares / max(self.changes, 1) / 2 / len(self.values))
        return statistics.fmean(self.values), max(_STANDARD_ERRORS * error, 1e-3 * abs(self.best or 0.0))
