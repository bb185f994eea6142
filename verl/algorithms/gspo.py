"""GSPO: Zheng et al., "Group Sequence Policy Optimization" (arXiv:2507.18071)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from verl.algorithms.aggregation import AggregationMode
from verl.algorithms.dapo import DAPO
from verl.algorithms.losses import PolicyLoss, PolicyTerms, gspo_loss
from verl.algorithms.policy import NO_DUAL_CLIP
from verl.algorithms.registry import register_algorithm
from verl.record import NotNegative


@register_algorithm("gspo")
class GSPO(DAPO):
    """GRPO's advantages, and one ratio for the whole response (row), which is clipped. The bounds are the paper's."""

    unread = NO_DUAL_CLIP
    no_gradient_at_zero = True

    filter_groups: bool = False
    loss_agg_mode: AggregationMode = "seq-mean-token-mean"
    clip_ratio_low: NotNegative | None = 3e-4
    clip_ratio_high: NotNegative | None = 4e-4

    def ratio(self, t: PolicyTerms) -> Tensor:
        """`[R]`: at each token the geometric mean of its row's token ratios."""
        return super().ratio(replace(t, log_ratio=t.row_mean(t.log_ratio)))

    def policy_loss(self, t: PolicyTerms) -> PolicyLoss:
        return gspo_loss(t, *self.clip_bounds)
