"""GMPO: Zhao et al., "Geometric-Mean Policy Optimization" (arXiv:2507.20673).

Deviation from verl: rows without a counted token are not counted, as in every other aggregation here.
"""

from __future__ import annotations

from torch import Tensor

from verl.algorithms.aggregation import AggregationMode
from verl.algorithms.dapo import DAPO
from verl.algorithms.losses import PolicyLoss, PolicyTerms, gmpo_loss
from verl.algorithms.policy import NO_DUAL_CLIP
from verl.algorithms.registry import register_algorithm
from verl.record import NotNegative

_TINY = 1e-10


@register_algorithm("gmpo")
class GMPO(DAPO):
    """GRPO's advantages; a row's objective is the geometric mean of its ratios. Clip bounds are on log-ratios."""

    unread = NO_DUAL_CLIP
    no_gradient_at_zero = True

    filter_groups: bool = False
    loss_agg_mode: AggregationMode = "seq-mean-token-mean"
    clip_ratio_low: NotNegative | None = 0.4
    clip_ratio_high: NotNegative | None = 0.4

    def policy_loss(self, t: PolicyTerms) -> PolicyLoss:
        return gmpo_loss(t, *self.clip_bounds)

    def importance(self, t: PolicyTerms, weights: Tensor) -> Tensor:
        """The geometric mean over the row, to match the objective."""
        return t.row_mean((weights + _TINY).log()).exp()
