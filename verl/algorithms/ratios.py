"""Algorithms with GRPO's advantages that bound the ratio to the old policy otherwise than PPO does."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from verl._base.autograd import bounded
from verl._base.record import NotNegative, Positive
from verl.algorithms.baselines import DAPO, GRPO
from verl.algorithms.kl import MAX_LOG_RATIO
from verl.algorithms.losses import AggregationMode, PolicyLoss, PolicyTerms, bounded_ratio, clipped_loss
from verl.algorithms.policy import NO_CLIP, NO_DUAL_CLIP
from verl.algorithms.registry import register_algorithm


@register_algorithm("gspo")
class GSPO(DAPO):
    """One ratio for the whole response (row), its length-normalised likelihood ratio, which is clipped: Zheng et al.,
    "Group Sequence Policy Optimization" (arXiv:2507.18071, equations 7 and 13). The bounds are the paper's."""

    unread = NO_DUAL_CLIP
    no_gradient_at_zero = True

    filter_groups: bool = False
    loss_agg_mode: AggregationMode = "seq-mean-token-mean"
    clip_ratio_low: NotNegative | None = 3e-4
    clip_ratio_high: NotNegative | None = 4e-4

    def ratio(self, t: PolicyTerms) -> Tensor:
        """`[R]`: at each token the geometric mean of its row's token ratios."""
        return bounded_ratio(t.row_mean(t.log_ratio))

    def policy_loss(self, t: PolicyTerms) -> PolicyLoss:
        """The token form of the paper: value of the row's ratio, gradient through the token's own log-prob."""
        row = t.row_mean(t.log_ratio).detach()
        log_ratio = bounded(t.log_probs - t.log_probs.detach() + row, -math.inf, 10.0)
        return clipped_loss(log_ratio.exp(), t.advantages, *self.clip_bounds)


@register_algorithm("cispo")
class CISPO(DAPO):
    """REINFORCE weighted by the ratio, clipped and detached, so that every token keeps a gradient: MiniMax,
    "MiniMax-M1" (arXiv:2506.13585, equation 4). A `clip_ratio_high` below 0 keeps the weight below 1.

    The paper leaves its upper bound open; a ratio of at most 5, no lower bound, is what later work settled on
    (arXiv:2510.13786).
    """

    unread = NO_DUAL_CLIP
    no_gradient_at_zero = True

    filter_groups: bool = False
    clip_ratio_low: NotNegative | None = 1.0
    clip_ratio_high: Annotated[float, Field(gt=-1, le=1e9)] | None = 4.0

    def policy_loss(self, t: PolicyTerms) -> PolicyLoss:
        low, high = self.clip_bounds
        ratio = bounded_ratio(t.log_ratio.detach())
        weight = ratio.clamp(1 - low, 1 + high)
        return PolicyLoss(-weight * t.advantages * t.log_probs, ratio != weight)


@register_algorithm("gmpo")
class GMPO(DAPO):
    """A row's objective is the geometric mean of its ratios, with clip bounds on log-ratios: Zhao et al.,
    "Geometric-Mean Policy Optimization" (arXiv:2507.20673, equation 4).

    Deviation from verl: rows without a counted token are not counted, as in every other aggregation here.
    """

    unread = NO_DUAL_CLIP
    no_gradient_at_zero = True

    filter_groups: bool = False
    loss_agg_mode: AggregationMode = "seq-mean-token-mean"
    clip_ratio_low: NotNegative | None = 0.4
    clip_ratio_high: NotNegative | None = 0.4

    def policy_loss(self, t: PolicyTerms) -> PolicyLoss:
        """The row's advantage is the mean of its tokens' (they are equal in the paper)."""
        low, high = self.clip_bounds
        sign = t.advantages.sign()
        free = bounded(t.log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        kept = free.clamp(-low, high)
        log_ratio = sign * torch.minimum(sign * free, sign * kept)
        loss = -t.row_mean(t.advantages) * t.row_mean(log_ratio).exp()
        outside = (free != kept) & t.active
        return PolicyLoss(loss, outside & (sign > 0), outside & (sign < 0))

    def importance(self, t: PolicyTerms, weights: Tensor) -> Tensor:
        """The geometric mean over the row, to match the objective."""
        return t.row_mean((weights + 1e-10).log()).exp()


@register_algorithm("sapo")
class SAPO(DAPO):
    """A gate that closes smoothly takes the place of clipping: the ratio r counts as 4 / T s(T (r - 1)), whose slope at
    1 is 1, with the temperature T of the advantage's sign: "Soft Adaptive Policy Optimization" (arXiv:2511.20347).

    Options:
        temperature_pos, temperature_neg: how fast it closes, for positive advantages and others.
    """

    unread = NO_CLIP
    no_gradient_at_zero = True

    filter_groups: bool = False
    loss_agg_mode: AggregationMode = "seq-mean-token-mean"
    temperature_pos: Positive = 1.0
    temperature_neg: Positive = 1.05

    def policy_loss(self, t: PolicyTerms) -> PolicyLoss:
        ratio = bounded_ratio(t.log_ratio)
        temperature = torch.where(t.advantages > 0, self.temperature_pos, self.temperature_neg).to(ratio.dtype)
        return PolicyLoss(-t.advantages * torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature)


@register_algorithm("vespo")
class VESPO(GRPO):
    """REINFORCE weighted by a gamma-shaped function of the row's ratio, 1 where the ratio is 1: "Variational
    Sequence-Level Soft Policy Optimization" (arXiv:2602.10693).

    Deviation: weights between the engine's and the trainer's log-probs multiply each token's loss, as elsewhere here;
    the paper's ratio of a sequence has them within.

    Options:
        k_pos, k_neg: power of the ratio; lambda_pos, lambda_neg: its exponential decay; for advantages from 0 on, and
            negative ones.
    """

    unread = NO_CLIP
    no_gradient_at_zero = True

    k_pos: NotNegative = 2.0
    lambda_pos: Positive = 3.0
    k_neg: NotNegative = 3.0
    lambda_neg: Positive = 2.0

    def policy_loss(self, t: PolicyTerms) -> PolicyLoss:
        return PolicyLoss(-self.row_weights(t) * t.advantages * t.log_probs)

    def row_weights(self, t: PolicyTerms) -> Tensor:
        """`[R]`: e^l w^k e^(-l w) of the likelihood ratio w of the row, detached, with k and l of the advantage's
        sign."""
        # Bounded by token and by row: one token far off must not turn e^(l + k log w - l w) into infinity times 0.
        ratios = t.row_sum(t.log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        row = ratios.clamp(math.log(1e-8), MAX_LOG_RATIO)
        positive = t.advantages >= 0
        power = torch.where(positive, self.k_pos, self.k_neg).to(row.dtype)
        decay = torch.where(positive, self.lambda_pos, self.lambda_neg).to(row.dtype)
        return (decay + power * row - decay * row.exp()).exp()
