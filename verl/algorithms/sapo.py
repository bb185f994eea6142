"""SAPO: "Soft Adaptive Policy Optimization" (arXiv:2511.20347)."""

from __future__ import annotations

from verl.algorithms.aggregation import AggregationMode
from verl.algorithms.dapo import DAPO
from verl.algorithms.losses import PolicyLoss, PolicyTerms, sapo_loss
from verl.algorithms.policy import NO_CLIP
from verl.algorithms.registry import register_algorithm
from verl.record import Positive


@register_algorithm("sapo")
class SAPO(DAPO):
    """GRPO's advantages; a gate that closes smoothly takes the place of clipping.

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
        return sapo_loss(t, self.temperature_pos, self.temperature_neg)
