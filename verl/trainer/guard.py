"""`SafetyGuard`: a monitored metric that gets worse takes training back to an earlier checkpoint."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from verl._base.checked import checked
from verl._base.names import check_logged
from verl._base.record import Count, Natural, Strings
from verl.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from verl.trainer.loop import Loop

logger = logging.getLogger(__name__)

#: A change counts from so many standard errors of the difference of two means on; and how much more that is where the
#: noise is known from few changes.
_STANDARD_ERRORS, _UNKNOWN = 6.0, 5.0
#: Values that a baseline is made of at least.
_LEAST = 8
_KEPT = ("values", "steps", "best", "count", "changes", "squares")


@dataclass(frozen=True)
class Alert:
    """The finding of a guard.

    Attributes:
        step: after which it was found.
        baseline, value: the best level of the metric so far, and the mean of its latest `window` values.
        back_to: the step that training goes back to.
    """

    step: int
    metric: str
    baseline: float
    value: float
    back_to: int

    def __str__(self) -> str:
        return (
            f"'{self.metric}' is {self.value:.4g} at step {self.step}, and was {self.baseline:.4g}: back to step "
            f"{self.back_to}"
        )


class SafetyGuard:
    """Watches metrics; when one falls below its own baseline, training goes back and goes on with other data.

    The baseline of a metric is the highest mean of `baseline` values in a row so far; until there are as many, the mean
    of all, from 8 on (the log says so). The metric has fallen once the mean of its latest values, between half
    a `window` and a whole one, is lower than the baseline before them by more than `threshold_delta`, and
    by more than six standard errors of the difference, the noise being that of its changes from one value to the next
    (ten, while only 8 values are known). So a noisy metric takes a larger fall, or a longer `window`. Then the trainer
    loads the checkpoint of `rollback_steps` before, or an earlier one if the fall began before that (or the oldest one
    kept), skips the data seen since, so that the same fall is not simply repeated, and goes on.

    Args:
        monitor_metrics: names in the log record, such as "reward", "eval/accuracy", or one of `Trainer.add_metric`.
        threshold_delta: the change that counts, relative to the baseline: -0.15 is a fall by 15 %. Above 0 it is a
            rise, and the baseline the lowest mean.
        rollback_steps: how far to go back, in steps.
        absolute: `threshold_delta` is in the metric's own unit.
        window, baseline: see above, in values of the metric.
        max_rollbacks: after this number, the next alert ends the run.
        on_alert: called with each `Alert`.

    Raises:
        ConfigError: an argument out of its range.
    """

    @checked
    def __init__(
        self,
        monitor_metrics: Annotated[Strings, Field(min_length=1)],
        threshold_delta: float = -0.15,
        rollback_steps: Count = 100,
        *,
        absolute: bool = False,
        window: Count = 10,
        baseline: Annotated[int, Field(ge=2)] = 30,
        max_rollbacks: Natural = 3,
        on_alert: Callable[[Alert], None] | None = None,
    ) -> None:
        if not threshold_delta or (threshold_delta <= -1 and not absolute):
            raise ConfigError(
                f"SafetyGuard.threshold_delta: must be a change such as -0.15, a fall by 15 %, not {threshold_delta}"
            )
        self.monitor_metrics = monitor_metrics
        self.threshold_delta, self.rollback_steps, self.absolute = threshold_delta, rollback_steps, absolute
        self.window, self.baseline = window, baseline
        self.max_rollbacks, self.on_alert = max_rollbacks, on_alert
        self.rollbacks = 0
        self._metrics = {name: _Metric(baseline, window, threshold_delta > 0) for name in self.monitor_metrics}
        self._steps = 0
        self._warned: set[str] = set()

    def observe(self, record: Mapping[str, Any], step: int | None = None) -> None:
        """Take the monitored metrics of the log record of a step (None: the next one); those that are absent or not
        finite are passed over."""
        self._steps = self._steps + 1 if step is None else step
        for name, metric in self._metrics.items():
            value = record.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                metric.add(float(value), self._steps)
                if metric.count == metric.least + metric.shortest:
                    logger.info(
                        "the guard is armed for '%s': %.4g in the mean of %d values, and better known with each",
                        name, statistics.fmean(metric.values[: metric.least]), metric.least,
                    )  # fmt: skip

    def fall(self) -> tuple[str, float, float, int] | None:
        """The first metric that has fallen (or risen): its name, baseline, present level, and the step of the latest
        value before the fall."""
        for name, metric in self._metrics.items():
            # All numbers of latest values that can be compared with a baseline before them.
            for latest in range(metric.shortest, min(self.window, len(metric.values) - metric.least) + 1):
                best, level = metric.best_before(latest), statistics.fmean(metric.values[-latest:])
                change = (level - best) * math.copysign(1.0, self.threshold_delta)
                least = abs(self.threshold_delta) * (1.0 if self.absolute else abs(best))
                if change > max(least, metric.error(latest)):
                    return name, best, level, metric.last_good()
        return None

    @property
    def unseen(self) -> list[str]:
        """Monitored metrics that no record has had so far."""
        return [name for name, metric in self._metrics.items() if not metric.values]

    def check(self, trainer: Loop, record: dict[str, Any]) -> Alert | None:
        """After the log record of a step has been observed: go back, if a metric has fallen; the finding.

        Raises:
            TrainingError: it has gone back as often as it may.
        """
        for name in self.unseen:
            if record.get("updated"):
                check_logged("trainer.guards: nothing logs the metric", name, record)
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("the guard has not seen metric '%s' yet: nothing logs it so far", name)
        if (fall := self.fall()) is None:
            return None
        metric, baseline, value, good = fall
        assert trainer.checkpoints is not None
        # What a step logs is of the weights before its update: those are the last that are known to be good.
        target = trainer.checkpoints.before(min(trainer.steps - self.rollback_steps, good - 1))
        alert = Alert(trainer.steps, metric, baseline, value, target)
        if self.on_alert is not None:
            self.on_alert(alert)
        if self.rollbacks >= self.max_rollbacks:
            raise TrainingError(
                f"the guard has gone back {self.rollbacks} times, as often as it may (max_rollbacks), and "
                f"'{metric}' is {value:.4g} where it was {baseline:.4g}: look at the rewards and the learning rate"
            )
        logger.warning("guard: %s; the data since then are skipped", alert)
        before = [guard.rollbacks for guard in trainer.guards]
        trainer.rollback(target, skip_data=True)
        for guard, count in zip(trainer.guards, before, strict=True):
            guard.rollbacks = count + (guard is self)
        # The position in the data and the count are part of it: a resume must not repeat what was skipped.
        trainer.checkpoints.saved = None
        trainer.checkpoints.save(trainer, last=True)
        return alert

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        metrics = {name: {key: getattr(of, key) for key in _KEPT} for name, of in self._metrics.items()}
        return {"rollbacks": self.rollbacks, "steps": self._steps, "metrics": metrics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rollbacks, self._steps = int(state["rollbacks"]), int(state["steps"])
        for name, metric in self._metrics.items():
            metric.load(state["metrics"][name])


class _Metric:
    """The latest values of a metric and their steps, its best level, and the changes from each value to the next.

    Attributes:
        least: values that make a baseline at least.
        shortest: values that make a level at least.
        count: of values so far.
        best: the best mean of `baseline` values in a row, a window ago or more.
        changes, squares: number, and sum of squares, of the changes that are behind the values that are kept.
    """

    def __init__(self, baseline: int, window: int, is_rise: bool) -> None:
        self._baseline, self._window, self._better = baseline, window, min if is_rise else max
        self.least, self.shortest = min(_LEAST, baseline), (window + 1) // 2
        self.values: list[float] = []
        self.steps: list[int] = []
        self.best: float | None = None
        self.count = self.changes = 0
        self.squares = 0.0

    def add(self, value: float, step: int) -> None:
        self.values.append(value)
        self.steps.append(step)
        self.count += 1
        if len(self.values) > self._baseline + self._window:
            self.changes, self.squares = self.changes + 1, self.squares + (self.values[1] - self.values[0]) ** 2
            del self.values[0], self.steps[0]
        if len(self.values) == self._baseline + self._window:
            self.best = self.best_before(self._window)

    def best_before(self, latest: int) -> float:
        """The best level before the `latest` values. A mean of few values is the level that there is, and not yet the
        best of several, of which one would be too high by chance."""
        level = statistics.fmean(self.values[:-latest][-self._baseline :])
        return level if self.best is None else self._better(self.best, level)

    def error(self, latest: int) -> float:
        """How much the mean of the `latest` values may differ from a baseline by chance."""
        before = self.values[:-latest]  # a fall is not to be taken for noise
        changes = self.changes + len(before) - 1
        squares = self.squares + sum((b - a) ** 2 for a, b in pairwise(before))
        noise = math.sqrt(squares / max(changes, 1) / 2)
        # A noise that is itself known from few changes may be more.
        errors = _STANDARD_ERRORS * (1 + _UNKNOWN / max(changes, 1))
        return errors * noise * math.sqrt(1 / latest + 1 / min(len(before), self._baseline))

    def last_good(self) -> int:
        """The step of the last value before the fall, which is where the values are divided best into two levels."""
        sums = list(accumulate(self.values, initial=0.0))
        total, sign = len(self.values), 1 if self._better is max else -1
        gaps = []
        for split in range(1, total):
            before, after = sums[split] / split, (sums[-1] - sums[split]) / (total - split)
            gaps.append((before - after) * sign * math.sqrt(split * (total - split)))
        return self.steps[gaps.index(max(gaps))]

    def load(self, saved: Mapping[str, Any]) -> None:
        self.values, self.steps = [float(v) for v in saved["values"]], [int(s) for s in saved["steps"]]
        self.best = None if saved["best"] is None else float(saved["best"])
        self.count, self.changes, self.squares = int(saved["count"]), int(saved["changes"]), float(saved["squares"])
        if len(self.values) != len(self.steps) or len(self.values) > self._baseline + self._window:
            raise ValueError(f"{len(self.values)} values of {len(self.steps)} steps")
