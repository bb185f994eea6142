"""CISPO: MiniMax, "MiniMax-M1" (arXiv:2506.13585).

The paper leaves its upper bound open; a ratio of at most 5, no lower bound, is what later work settled on
(arXiv:2510.13786).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from verl.algorithms.dapo import DAPO
from verl.algorithms.losses import PolicyLoss, PolicyTerms, cispo_loss
from verl.algorithms.policy import NO_DUAL_CLIP
from verl.algorithms.registry import register_algorithm
from verl.record import NotNegative


@register_algorithm("cispo")
class CISPO(DAPO):
    """GRPO's advantages; the ratio is a detached, clipped weight, so every token keeps a gradient. A `clip_ratio_high`
    below 0 keeps it below 1."""

    unread = NO_DUAL_CLIP
    no_gradient_at_zero = True

    filter_groups: bool = False
    clip_ratio_low: NotNegative | None = 1.0
    clip_ratio_high: Annotated[float, Field(gt=-1, le=1e9)] | None = 4.0

    def policy_loss(self, t: PolicyTerms) -> PolicyLoss:
        return cispo_loss(t, *self.clip_bounds)
