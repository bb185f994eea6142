"""Safe-RLHF: Dai et al., "Safe RLHF: Safe Reinforcement Learning from Human Feedback" (arXiv:2310.12773).

The policy maximises reward subject to mean cost <= `cost_limit`, by advantages
(A_reward - lambda A_cost) / (1 + lambda) and dual ascent on lambda (equations 9 and 31).

Deviations. The ascent (see `lagrangian`) is without the paper's factor lambda: with it a small lambda hardly grows
back, and a large one jumps. It has a proportional term (`lambda_kp=0` is ascent alone) and bounds. KL is added to
the cost with the full coefficient, where the paper has half of it in each: after the division the penalty is
`kl_coef` for every lambda. With `baseline="group"` rewards and costs are centred in their group, and no critic is
trained.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from verl.algorithms.advantages import gae, grpo, whiten
from verl.algorithms.base import Loss, LossInput
from verl.algorithms.lagrangian import ConstrainedPolicyGradient
from verl.algorithms.policy import Experience
from verl.algorithms.ppo import critic_loss
from verl.algorithms.registry import register_algorithm
from verl.record import Positive, Share


@register_algorithm("safe_rlhf")
class SafeRLHF(ConstrainedPolicyGradient):
    """Options:
    baseline: "group" baselines, or two "critics" (reward and cost) with gamma, lam and cliprange_value.
    norm_adv_by_std: with group baselines, divide each by the group's standard deviation, as GRPO does; lambda is
        then no longer the price of a unit of cost in units of reward.
    """

    no_gradient_at_zero: ClassVar[bool] = True

    baseline: Literal["group", "critics"] = "group"
    norm_adv_by_std: bool = False
    gamma: Share = 1.0
    lam: Share = 1.0
    cliprange_value: Positive | None = 0.5

    @property
    def roles(self) -> frozenset[str]:
        return super().roles | ({"critic", "cost_critic"} if self.baseline == "critics" else set())

    @property
    def unread_options(self) -> dict[str, str]:
        unread = super().unread_options
        if self.baseline == "critics":
            return unread | {"norm_adv_by_std": "it is for baseline='group'"}
        return unread | dict.fromkeys(("gamma", "lam", "cliprange_value"), "it is for baseline='critics'")

    @property
    def needs_groups(self) -> bool:
        return self.baseline == "group"

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        outcome_cost = e.batch.tensor("cost", torch.float64)
        if self.baseline == "group":
            groups, spread = e.responses.groups, e.responses.spread
            reward = spread(grpo(e.outcome, groups, self.norm_adv_by_std))
            cost = spread(grpo(outcome_cost + e.responses.sum(e.kl_penalty), groups, self.norm_adv_by_std))
            return {"advantages": self._combine(reward, cost)}
        rows = e.episodes.trajectories
        reward, returns = gae(e.token_rewards, rows.tokens("values"), rows, self.gamma, self.lam)
        costs = rows.at_last_token(e.episodes.rows.tensor("cost", torch.float64)) + e.kl_penalty
        cost, cost_returns = gae(costs, rows.tokens("cost_values"), rows, self.gamma, self.lam)
        advantages = whiten(self._combine(reward, cost), e.responses.trained)
        return {"advantages": advantages, "returns": returns, "cost_returns": cost_returns}

    def compute_critic_loss(self, x: LossInput) -> Loss:
        return critic_loss(x, "", self.cliprange_value)

    def compute_cost_critic_loss(self, x: LossInput) -> Loss:
        return critic_loss(x, "cost_", self.cliprange_value)

    def _combine(self, reward: Tensor, cost: Tensor) -> Tensor:
        return (reward - self.price * cost) / (1 + self.price)
