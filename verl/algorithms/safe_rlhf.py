"""Safe-RLHF: Dai et al., "Safe RLHF: Safe Reinforcement Learning from Human Feedback" (arXiv:2310.12773).

The policy maximises reward subject to mean cost <= `cost_limit`, by advantages
(A_reward - lambda A_cost) / (1 + lambda) and dual ascent on lambda (equations 9 and 31).

Deviations. The ascent is log lambda += lr * (mean cost - limit), without the paper's factor lambda: with it a small
lambda hardly grows back, and a large one jumps. To it comes a proportional term (PID Lagrangian, arXiv:2007.03964):
with ascent alone policy and lambda chase each other round the limit instead of settling on it; `lambda_kp=0` is
ascent alone. Lambda stays in [lambda_min, lambda_max]. KL is added to the cost with the full coefficient, where the
paper has half of it in each: after the division the penalty is `kl_coef` for every lambda. With
`baseline="group"` rewards and costs are centred in their group, and no critic is trained.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Literal

import torch
from torch import Tensor

from verl.algorithms.advantages import gae, grpo, whiten
from verl.algorithms.base import Loss, LossInput, drop_abstained
from verl.algorithms.policy import Experience, PolicyGradient
from verl.algorithms.ppo import critic_loss
from verl.algorithms.registry import register_algorithm
from verl.batch import Batch
from verl.errors import ConfigError


@register_algorithm("safe_rlhf")
class SafeRLHF(PolicyGradient):
    """Options:
    baseline: "group" baselines, or two "critics" (reward and cost) with gamma, lam and cliprange_value.
    cost_limit: bound of the mean cost a sample.
    norm_adv_by_std: with group baselines, divide each by the group's standard deviation, as GRPO does; lambda is
        then no longer the price of a unit of cost in units of reward.
    lambda_init, lambda_min, lambda_max: lambda_lr 0 holds lambda at lambda_init, be it 0.
    lambda_lr, lambda_kp: change of log lambda for a unit of cost above the limit, kept and passing.
    lambda_delay: batches before the first update; lambda_window: samples whose costs are averaged.
    """

    baseline: Literal["group", "critics"] = "group"
    norm_adv_by_std: bool = False
    gamma: float = 1.0
    lam: float = 1.0
    cliprange_value: float | None = 0.5
    cost_limit: float = 0.0
    lambda_init: float = 1.0
    lambda_lr: float = 0.1
    lambda_kp: float = 10.0
    lambda_min: float = 1e-3
    lambda_max: float = 100.0
    lambda_delay: int = 0
    lambda_window: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lambda_lr and not 0 < self.lambda_min <= self.lambda_init <= self.lambda_max < math.inf:
            raise ConfigError("safe_rlhf needs 0 < lambda_min <= lambda_init <= lambda_max (or lambda_lr=0)")
        if min(self.lambda_init, self.lambda_lr, self.lambda_kp) < 0 or self.lambda_window < 1:
            raise ConfigError("safe_rlhf needs lambda_init, lambda_lr, lambda_kp >= 0 and lambda_window >= 1")
        # The price in use, and the part of it that the ascent has accumulated.
        self._lambda = self._accumulated = self.lambda_init
        self._batches = 0
        self._costs: deque[float] = deque(maxlen=self.lambda_window)

    @property
    def roles(self) -> frozenset[str]:
        return super().roles | {"cost"} | ({"critic", "cost_critic"} if self.baseline == "critics" else set())

    @property
    def needs_groups(self) -> bool:
        return self.baseline == "group"

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        batch, abstained = drop_abstained(batch, ("reward", "cost"))
        costs = batch.tensor("cost", torch.float64).tolist()
        self._update_lambda(costs)
        prepared, metrics = super().prepare(batch)
        mean = sum(costs) / max(len(costs), 1)
        return prepared, {**metrics, **abstained, "cost/mean": mean, "lambda": self._lambda}

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        costs = e.responses.at_last_token(e.batch.tensor("cost", torch.float64)) + e.kl_penalty
        if self.baseline == "group":
            groups, spread = e.responses.groups, e.responses.spread
            reward = spread(grpo(e.outcome, groups, self.norm_adv_by_std))
            cost = spread(grpo(e.responses.sum(costs), groups, self.norm_adv_by_std))
            return {"advantages": self._combine(reward, cost)}
        reward, returns = gae(e.token_rewards, e.responses.tokens("values"), e.responses, self.gamma, self.lam)
        cost, cost_returns = gae(costs, e.responses.tokens("cost_values"), e.responses, self.gamma, self.lam)
        advantages = whiten(self._combine(reward, cost), e.responses.trained)
        return {"advantages": advantages, "returns": returns, "cost_returns": cost_returns}

    def compute_critic_loss(self, x: LossInput) -> Loss:
        return critic_loss(x, "", self.cliprange_value)

    def compute_cost_critic_loss(self, x: LossInput) -> Loss:
        return critic_loss(x, "cost_", self.cliprange_value)

    def state_dict(self) -> dict[str, Any]:
        own = {"lambda": self._lambda, "accumulated": self._accumulated, "batches": self._batches}
        return {**super().state_dict(), **own, "costs": list(self._costs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._lambda, self._accumulated = float(state["lambda"]), float(state["accumulated"])
        self._batches = int(state["batches"])
        self._costs = deque(state["costs"], maxlen=self.lambda_window)

    def _combine(self, reward: Tensor, cost: Tensor) -> Tensor:
        return (reward - self._lambda * cost) / (1 + self._lambda)

    def _update_lambda(self, costs: list[float]) -> None:
        """One ascent step, by the costs of this batch and the window; none if the batch brought no cost."""
        self._batches += 1
        self._costs.extend(costs)
        if not costs or not self.lambda_lr or self._batches <= self.lambda_delay:
            return
        # Divided first: a sum of finite costs may overflow, their mean cannot.
        violation = sum(cost / len(self._costs) for cost in self._costs) - self.cost_limit
        self._accumulated = self._raised(self._accumulated, self.lambda_lr * violation)
        self._lambda = self._raised(self._accumulated, self.lambda_kp * violation)

    def _raised(self, value: float, exponent: float) -> float:
        """value * e^exponent within the bounds, whatever the exponent."""
        low, high = math.log(self.lambda_min), math.log(self.lambda_max)
        bounded = min(max(math.log(value) + exponent, low), high)
        return min(max(math.exp(bounded), self.lambda_min), self.lambda_max)
