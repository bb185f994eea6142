"""Safe-RLHF: Dai et al., "Safe RLHF: Safe Reinforcement Learning from Human Feedback" (arXiv:2310.12773).

The policy maximises reward subject to mean cost <= `cost_limit`, by advantages
(A_reward - lambda A_cost) / (1 + lambda) and dual ascent on lambda, the Lagrange multiplier of the bound (equations 9
and 31). It is in log space: log lambda += lr * (mean cost - limit), which accumulates. To it comes a proportional term
(PID Lagrangian, arXiv:2007.03964): with ascent alone policy and lambda chase each other round the limit instead of
settling on it.

Deviations. The ascent is without the paper's factor lambda: with it a small lambda hardly grows back, and a large one
jumps. It has the proportional term (`lambda_kp=0` is ascent alone) and bounds. KL is added to the cost with the full
coefficient, where the paper has half of it in each: after the division the penalty is `kl_coef` for every lambda. With
`baseline="group"` rewards and costs are centred in their group, and no critic is trained.
"""

from __future__ import annotations

import math
from functools import partialmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from verl._base.record import Count, Natural, NotNegative, Number, Positive
from verl.algorithms.advantages import gae, grpo, whiten
from verl.algorithms.base import drop_abstained
from verl.algorithms.policy import Experience
from verl.algorithms.ppo import ActorCritic
from verl.algorithms.registry import register_algorithm
from verl.batch import Batch
from verl.errors import ConfigError


@register_algorithm("safe_rlhf")
class SafeRLHF(ActorCritic):
    """Keeps `price`, the multiplier lambda, up to date with the costs.

    Options:
        baseline: "group" baselines, or two "critics" (reward and cost) with gamma, lam and cliprange_value.
        norm_adv_by_std: with group baselines, divide each by the group's standard deviation, as GRPO does; lambda is
            then no longer the price of a unit of cost in units of reward.
        cost_limit: bound of the mean cost a sample.
        lambda_init, lambda_min, lambda_max: lambda_lr 0 holds lambda at lambda_init, be it 0.
        lambda_lr, lambda_kp: change of log lambda for a unit of cost above the limit, kept and passing.
        lambda_delay: batches before the first update; lambda_window: samples whose costs are averaged.
    """

    roles = ActorCritic.roles | {"cost"}
    no_gradient_at_zero = True
    _state: ClassVar = {
        **ActorCritic._state,
        "lambda": "price",
        "accumulated": "_accumulated",
        "batches": "_batches",
        "costs": "_costs",
    }
    read_with: ClassVar = {
        "norm_adv_by_std": ("baseline", "group"),
        **dict.fromkeys(("gamma", "lam", "cliprange_value"), ("baseline", "critics")),
        **dict.fromkeys(("cost_limit", "lambda_kp", "lambda_min", "lambda_max"), ("lambda_lr",)),
        **dict.fromkeys(("lambda_delay", "lambda_window"), ("lambda_lr",)),
    }

    baseline: Literal["group", "critics"] = "group"
    norm_adv_by_std: bool = False
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
        self.needs_groups = self.baseline == "group"
        if not self.needs_groups:
            self.roles |= {"critic", "cost_critic"}
        self.price = self._accumulated = self.lambda_init
        self._batches = 0
        self._costs: list[float] = []

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        batch, abstained = drop_abstained(batch, ("reward", "cost"), by_group=self.needs_groups)
        costs = batch.take([rows[0] for rows in batch.group_indices("episode")]).tensor("cost", torch.float64).tolist()
        self._ascend(costs)
        prepared, metrics = super().prepare(batch)
        mean = sum(costs) / max(len(costs), 1)
        return prepared, {**metrics, **abstained, "cost/mean": mean, "lambda": self.price}

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        if self.baseline == "group":
            outcome_cost = e.batch.tensor("cost", torch.float64) + e.responses.sum(e.kl_penalty)
            of_group = [grpo(x, e.responses.groups, self.norm_adv_by_std) for x in (e.outcome, outcome_cost)]
            reward, cost = (x[e.responses.sequence] for x in of_group)
            return {"advantages": (reward - self.price * cost) / (1 + self.price)}
        rows = e.episodes.trajectories
        reward, returns = gae(e.token_rewards, rows.tokens("values"), rows, self.gamma, self.lam)
        costs = rows.at_last_token(e.episodes.rows.tensor("cost", torch.float64)) + e.kl_penalty
        cost, cost_returns = gae(costs, rows.tokens("cost_values"), rows, self.gamma, self.lam)
        advantages = whiten((reward - self.price * cost) / (1 + self.price), e.responses.trained)
        return {"advantages": advantages, "returns": returns, "cost_returns": cost_returns}

    # Of the class: an override of the reward critic's loss is not the cost critic's.
    compute_cost_critic_loss = partialmethod(ActorCritic.compute_critic_loss, prefix="cost_")

    def _ascend(self, costs: list[float]) -> None:
        """One step, by the costs of this batch and the window; none if the batch brought no cost."""
        self._batches += 1
        self._costs = [*self._costs, *costs][-self.lambda_window :]
        if not costs or not self.lambda_lr or self._batches <= self.lambda_delay:
            return
        # Divided first: a sum of finite costs may overflow, their mean cannot.
        violation = sum(cost / len(self._costs) for cost in self._costs) - self.cost_limit
        self._accumulated = self._raised(self._accumulated, self.lambda_lr * violation)
        self.price = self._raised(self._accumulated, self.lambda_kp * violation)

    def _raised(self, value: float, exponent: float) -> float:
        """value * e^exponent within the bounds, whatever the exponent."""
        # In logarithms, since e^exponent may overflow where the bounded product does not.
        low, high = math.log(self.lambda_min), math.log(self.lambda_max)
        bounded = min(max(math.log(value) + exponent, low), high)
        return min(max(math.exp(bounded), self.lambda_min), self.lambda_max)
