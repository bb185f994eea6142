"""A metric in a form of rewards, which gives one number a row."""

from __future__ import annotations

from typing import ClassVar

from verl.rewards.functions import FunctionReward


class RowMetric(FunctionReward):
    """Called as a reward is; messages say that it is a metric."""

    what: ClassVar[str] = "metric"
    calls_on_fewer: ClassVar[bool] = True
