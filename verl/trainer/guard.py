"""`SafetyGuard`: a monitored metric that gets worse takes training back to an earlier checkpoint."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from verl.checked import checked
from verl.errors import CheckpointError, ConfigError, TrainingError
from verl.record import Count, Natural, Strings

if TYPE_CHECKING:
    from verl.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

#: A change counts from so many standard errors of the difference of two means on.
_STANDARD_ERRORS = 6.0


@dataclass(frozen=True)
class Alert:
    """What a guard found.

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

    The baseline of a metric is the highest mean of `baseline` values in a row so far. The metric has fallen once the
    mean of the `window` values after them is lower by more than `threshold_delta`, and by more than six standard
    errors of the difference, the noise being that of its changes from one value to the next. So a noisy metric takes
    a larger fall, or a longer `window`. Then the trainer loads the checkpoint of `rollback_steps` before (or the oldest
    one kept), skips the data seen since, so that the same fall is not simply repeated, and goes on.

    Args:
        monitor_metrics: names in the log record, such as "reward", "eval/accuracy", or one of `Trainer.add_metric`.
        threshold_delta: the change that counts, relative to the baseline: -0.15 is a fall by 15 %. Above 0 it is a
            rise, and the baseline the lowest mean.
        rollback_steps: how far to go back, in steps.
        absolute: `threshold_delta` is in the metric's own unit.
        window, baseline: see above, in values of the metric.
        max_rollbacks: after so many, the next alert ends the run.
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
        self._metrics = {name: _Metric() for name in self.monitor_metrics}

    def observe(self, record: Mapping[str, Any]) -> None:
        """Take the monitored metrics of a log record; those that are absent or not finite are passed over."""
        for name, metric in self._metrics.items():
            value = record.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                metric.add(float(value), self.baseline, self.window, self.threshold_delta > 0)

    def fallen(self) -> tuple[str, float, float] | None:
        """The first metric that has fallen (or risen), with its baseline and present level."""
        for name, metric in self._metrics.items():
            if len(metric.values) < self.baseline + self.window or metric.best is None:
                continue
            level = statistics.fmean(metric.values[-self.window :])
            change = (level - metric.best) * math.copysign(1.0, self.threshold_delta)
            least = abs(self.threshold_delta) * (1.0 if self.absolute else abs(metric.best))
            error = metric.noise * math.sqrt(1 / self.window + 1 / self.baseline)
            if change > max(least, _STANDARD_ERRORS * error):
                return name, metric.best, level
        return None

    @property
    def unseen(self) -> list[str]:
        """Monitored metrics that no record has had so far."""
        return [name for name, metric in self._metrics.items() if not metric.values]

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        metrics = {name: dict(vars(metric)) for name, metric in self._metrics.items()}
        return {"rollbacks": self.rollbacks, "metrics": metrics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rollbacks = int(state["rollbacks"])
        for name, metric in self._metrics.items():
            saved = state["metrics"][name]
            metric.values, metric.best = [float(value) for value in saved["values"]], saved["best"]
            metric.changes, metric.squares = int(saved["changes"]), float(saved["squares"])


class _Metric:
    """The latest values of a metric, its best level, and the changes from each value to the next before the window."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.best: float | None = None
        self.changes, self.squares = 0, 0.0

    def add(self, value: float, baseline: int, window: int, is_rise: bool) -> None:
        self.values = [*self.values, value][-(baseline + window) :]
        before = self.values[:-window]  # a fall is not to be taken for noise
        if len(before) > 1:
            self.changes, self.squares = self.changes + 1, self.squares + (before[-1] - before[-2]) ** 2
        if len(self.values) == baseline + window:
            level = statistics.fmean(self.values[:baseline])
            better = min if is_rise else max
            self.best = level if self.best is None else better(self.best, level)

    @property
    def noise(self) -> float:
        """Standard deviation of a value about a level that drifts."""
        return math.sqrt(self.squares / max(self.changes, 1) / 2)


class Guards:
    """The guards of a trainer."""

    def __init__(self) -> None:
        self._guards: list[SafetyGuard] = []
        self._warned: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._guards)

    def add(self, guard: SafetyGuard, trainer: Trainer) -> None:
        """Raises ConfigError if the trainer has no automatic checkpoints to go back to."""
        if trainer.checkpoints is None:
            raise ConfigError("a guard goes back to checkpoints: give the trainer checkpoint_dir= and save_every=")
        trainer.checkpoints.store.reach = max(trainer.checkpoints.store.reach, guard.rollback_steps)
        self._guards.append(guard)

    def observe(self, record: Mapping[str, Any]) -> None:
        """Take the metrics of a log record."""
        for guard in self._guards:
            guard.observe(record)

    def check(self, trainer: Trainer) -> Alert | None:
        """Go back if a guard says so; what it found.

        Raises:
            TrainingError: it has gone back as often as it may.
        """
        for guard in self._guards:
            for name in (name for name in guard.unseen if name not in self._warned):
                self._warned.add(name)
                logger.warning("the guard has not seen metric '%s' yet: nothing logs it so far", name)
            if (found := guard.fallen()) is not None:
                return self._go_back(guard, trainer, *found)
        return None

    def _go_back(self, guard: SafetyGuard, trainer: Trainer, metric: str, baseline: float, value: float) -> Alert:
        assert trainer.checkpoints is not None
        step = trainer.steps
        target = trainer.checkpoints.before(step - guard.rollback_steps)
        alert = Alert(step, metric, baseline, value, target)
        if guard.on_alert is not None:
            guard.on_alert(alert)
        if guard.rollbacks >= guard.max_rollbacks:
            raise TrainingError(
                f"the guard has gone back {guard.rollbacks} times, as often as it may (max_rollbacks), and "
                f"'{metric}' is {value:.4g} where it was {baseline:.4g}: look at the rewards and the learning rate"
            )
        logger.warning("guard: %s; the data since then are skipped", alert)
        before = [each.rollbacks for each in self._guards]
        trainer.rollback(target, skip_data=True)
        for each, count in zip(self._guards, before, strict=True):
            each.rollbacks = count + (each is guard)
        # The position in the data and the count are part of it: a resume must not repeat what was skipped.
        trainer.checkpoints.saved = None
        trainer.checkpoints.save(trainer, last=True)
        return alert

    def state_dict(self) -> list[dict[str, Any]]:
        return [guard.state_dict() for guard in self._guards]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Raises CheckpointError if the state is not of these guards."""
        for guard, saved in zip(self._guards, state, strict=False):
            try:
                guard.load_state_dict(saved)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointError(f"the state of a guard: {type(error).__name__}: {error}") from error
