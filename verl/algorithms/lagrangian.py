"""Reward under a bound on the mean cost: the Lagrange multiplier of the bound, by dual ascent in log space.

log lambda += lr * (mean cost - limit), which accumulates. To it comes a proportional term (PID Lagrangian,
arXiv:2007.03964): with ascent alone policy and lambda chase each other round the limit instead of settling on it.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch

from verl.algorithms.base import drop_abstained
from verl.algorithms.policy import PolicyGradient
from verl.batch import Batch
from verl.errors import ConfigError
from verl.record import Count, Natural, NotNegative, Number, Positive


class ConstrainedPolicyGradient(PolicyGradient):
    """Base of algorithms with a constraint: keeps `price`, the multiplier lambda, up to date with the costs.

    Options:
        cost_limit: bound of the mean cost a sample.
        lambda_init, lambda_min, lambda_max: lambda_lr 0 holds lambda at lambda_init, be it 0.
        lambda_lr, lambda_kp: change of log lambda for a unit of cost above the limit, kept and passing.
        lambda_delay: batches before the first update; lambda_window: samples whose costs are averaged.
    """

    cost_limit: Number = 0.0
    lambda_init: NotNegative = 1.0
    lambda_lr: NotNegative = 0.1
    lambda_kp: NotNegative = 10.0
    lambda_min: Positive = 1e-3
    lambda_max: Positive = 100.0
    lambda_delay: Natural = 0
    lambda_window: Count = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lambda_lr and not self.lambda_min <= self.lambda_init <= self.lambda_max:
            raise ConfigError(f"{self.name} needs lambda_min <= lambda_init <= lambda_max (or lambda_lr=0)")
        self.price = self._accumulated = self.lambda_init
        self._batches = 0
        self._costs: deque[float] = deque(maxlen=self.lambda_window)

    @property
    def unread_options(self) -> dict[str, str]:
        unread = super().unread_options
        if self.lambda_lr:
            return unread
        ascent = ("cost_limit", "lambda_kp", "lambda_min", "lambda_max", "lambda_delay", "lambda_window")
        return unread | dict.fromkeys(ascent, "lambda is held with lambda_lr=0: set lambda_lr, or leave it out")

    @property
    def roles(self) -> frozenset[str]:
        return super().roles | {"cost"}

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        batch, abstained = drop_abstained(batch, ("reward", "cost"), by_group=self.needs_groups)
        costs = batch.take([rows[0] for rows in batch.episode_indices()]).tensor("cost", torch.float64).tolist()
        self._ascend(costs)
        prepared, metrics = super().prepare(batch)
        mean = sum(costs) / max(len(costs), 1)
        return prepared, {**metrics, **abstained, "cost/mean": mean, "lambda": self.price}

    def state_dict(self) -> dict[str, Any]:
        state = {"lambda": self.price, "accumulated": self._accumulated, "batches": self._batches}
        return {**super().state_dict(), **state, "costs": list(self._costs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.price, self._accumulated = float(state["lambda"]), float(state["accumulated"])
        self._batches = int(state["batches"])
        self._costs = deque(map(float, state["costs"]), maxlen=self.lambda_window)

    def _ascend(self, costs: list[float]) -> None:
        """One step, by the costs of this batch and the window; none if the batch brought no cost."""
        self._batches += 1
        self._costs.extend(costs)
        if not costs or not self.lambda_lr or self._batches <= self.lambda_delay:
            return
        # Divided first: a sum of finite costs may overflow, their mean cannot.
        violation = sum(cost / len(self._costs) for cost in self._costs) - self.cost_limit
        self._accumulated = self._raised(self._accumulated, self.lambda_lr * violation)
        self.price = self._raised(self._accumulated, self.lambda_kp * violation)

    def _raised(self, value: float, exponent: float) -> float:
        """value * e^exponent within the bounds, whatever the exponent."""
        low, high = math.log(self.lambda_min), math.log(self.lambda_max)
        bounded = min(max(math.log(value) + exponent, low), high)
        return min(max(math.exp(bounded), self.lambda_min), self.lambda_max)
