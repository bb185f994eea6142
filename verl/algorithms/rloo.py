"""RLOO: Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization" (arXiv:2402.14740).

Deviation, as in verl: the loss is PPO's clipped one, which on the first step of a batch is plain REINFORCE.
"""

from __future__ import annotations

from torch import Tensor

from verl.algorithms.advantages import rloo
from verl.algorithms.policy import Experience, PolicyGradient
from verl.algorithms.registry import register_algorithm


@register_algorithm("rloo")
class RLOO(PolicyGradient):
    """Advantage: the reward minus the mean reward of the group's other samples."""

    needs_groups = True
    zero_where_alike = True

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        return {"advantages": e.responses.spread(rloo(e.outcome, e.responses.groups))}
