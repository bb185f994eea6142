"""OPO: Hao et al., "On-Policy RL with Optimal Reward Baseline" (arXiv:2505.23585).

Deviation, as in verl: the loss is PPO's clipped one, which on the first step of a batch is the paper's.
"""

from __future__ import annotations

from torch import Tensor

from verl.algorithms.advantages import opo
from verl.algorithms.policy import Experience, PolicyGradient
from verl.algorithms.registry import register_algorithm


@register_algorithm("opo")
class OPO(PolicyGradient):
    """Advantage: the reward minus the group's length-weighted mean, the baseline of least variance."""

    needs_groups = True
    zero_where_alike = True

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        lengths = e.responses.count(e.responses.written)
        return {"advantages": e.responses.spread(opo(e.outcome, e.responses.groups, lengths))}
