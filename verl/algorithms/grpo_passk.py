"""GRPO for pass@k: Tang et al., "Optimizing Language Models for Inference Time Objectives" (arXiv:2503.19595).

Deviations: the loss is PPO's clipped one, as in verl, which on the first step of a batch is plain REINFORCE. A group of
one has advantage 0; in verl it is an error.
"""

from __future__ import annotations

from torch import Tensor

from verl.algorithms.advantages import passk
from verl.algorithms.grpo import GRPO
from verl.algorithms.policy import Experience
from verl.algorithms.registry import register_algorithm


@register_algorithm("grpo_passk")
class GRPOPassK(GRPO):
    """Only the best sample of a group learns, by its lead over the second best."""

    zero_where_alike = True
    unread = dict.fromkeys(("clip_ratio_low", "clip_ratio_c"), "it clips negative advantages, and there are none")

    norm_adv_by_std: bool = True

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        advantages = passk(e.outcome, e.responses.groups, self.norm_adv_by_std, self.std_epsilon)
        return {"advantages": e.responses.spread(advantages)}
