"""Metrics of the user's own, over scored samples."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar

from verl._host.user_calls import DEADLINE, UserCode
from verl._host.user_code import describe, show_once, traceback_of
from verl.batch import Batch
from verl.errors import ConfigError, DataError, RewardError, shown
from verl.rewards.failures import Failures
from verl.rewards.functions import FunctionReward
from verl.rewards.signatures import TEXTS, recognise
from verl.rewards.source import run_reward

logger = logging.getLogger(__name__)

#: From scored samples to one number a row (None: none), or to one number for all of them; or a function in a form of
#: rewards (`verl.rewards.signatures`), which gives one number a row.
MetricFn = Callable[..., Any]


class Metric:
    """A user's function as a metric: `metric(samples)`.

    Args:
        name: what it is called in records.
        function: of the scored samples, `f(samples)`, or in a form of rewards.

    Raises:
        ConfigError: it is no function, or has neither form.
    """

    def __init__(self, name: str, function: MetricFn) -> None:
        if not callable(function):
            raise ConfigError(f"metric '{name}' is a {type(function).__name__}: give a function of the scored samples")
        self.name, self.function, self._failures = name, function, Failures(0.5)  # as of a reward
        self._code = UserCode(f"metric {name}")
        self.by_row: RowMetric | None = None
        if not takes_batch(function):
            try:
                self.by_row = RowMetric(function, name=name, whole_batch=not recognise(function).by_row)
            except ConfigError as error:
                why = f"is no f(samples), which reads their columns itself, and {error}"
                raise ConfigError(f"metric '{name}' {why}") from None

    def __call__(self, samples: Batch, seconds: float = DEADLINE) -> tuple[float, list[float | None] | None]:
        """The metric (NaN: it failed, or no row has a number), and the number of each row where it gives those.

        Args:
            seconds: that a function of all samples may take. (One in a form of rewards has a reward's deadline.)

        Raises:
            DataError: it returns no number, or not as many as there are rows.
            RewardError: it needs a column that is missing, or failed on too many of the latest samples.
        """
        if self.by_row is not None:
            rows = run_reward(self.by_row, samples).reward
            return mean(rows), rows
        try:
            value = self._code.run(seconds, self.function, samples)
        except Exception as error:  # a user's code may raise anything
            too_many = self._failures.add([True] * len(samples))
            what = describe(error)
            logger.warning("metric %s raised %s", self.name, what)
            show_once(logger, f"metric {self.name}", traceback_of(error))
            if too_many:
                raise RewardError(f"metric '{self.name}' failed on {too_many} (latest: {what}): mend it") from error
            return math.nan, None
        self._failures.add([False] * len(samples))
        return self._read(value, len(samples))

    def _read(self, value: Any, rows: int) -> tuple[float, list[float | None] | None]:
        value = value.tolist() if hasattr(value, "tolist") else value
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if is_list and len(value) != rows:
            raise DataError(f"metric '{self.name}' returned {len(value)} values for {rows} samples")
        try:
            return (mean(value), list(value)) if is_list else (float(value), None)
        except (TypeError, ValueError):
            raise DataError(
                f"metric '{self.name}' returned {shown(value)}: give one number for all samples, or a list of one "
                "number (or None) for each"
            ) from None


def takes_batch(function: MetricFn) -> bool:
    """Whether a metric takes the samples as a `Batch`: it has at most one parameter without a default, and none with a
    name that texts have in rewards."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # compiled code may have no signature
        return True
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(needed) <= 1 and not TEXTS & {p.name for p in parameters}


class RowMetric(FunctionReward):
    """A metric in a form of rewards, one number a row. Called as a reward is; messages say that it is a metric."""

    what: ClassVar[str] = "metric"
    calls_on_fewer: ClassVar[bool] = True


def add_metrics(
    record: MutableMapping[str, Any], more: Mapping[str, Any], names: Collection[str], replaced: Collection[str] = ()
) -> None:
    """Add to the record of a step.

    Args:
        names: the user's own metrics.
        replaced: metrics whose value in the record gives way to that in `more`.

    Raises:
        ConfigError: two other metrics have one name.
    """
    twice = record.keys() & more.keys()
    if users := sorted(twice & set(names)):
        raise ConfigError(f"the trainer has a metric '{users[0]}' of its own: give add_metric another name")
    if others := sorted(twice - set(replaced)):
        raise ConfigError(f"two metrics of a step are called '{others[0]}': give yours another name")
    record.update(more)


def mean(values: Sequence[float | None]) -> float:
    """Mean of the values that are there; NaN if none is."""
    present = [float(value) for value in values if value is not None]
    try:
        return math.fsum(present) / len(present) if present else math.nan
    except OverflowError:  # of the sum alone
        return math.fsum(value / len(present) for value in present)
