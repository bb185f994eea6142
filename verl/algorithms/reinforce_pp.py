"""REINFORCE++ and its baseline variant: Hu, "REINFORCE++" (arXiv:2501.03262)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from verl.algorithms.advantages import discounted_returns, group_centred, whiten
from verl.algorithms.policy import Experience, PolicyGradient
from verl.algorithms.registry import register_algorithm
from verl.record import Share


@register_algorithm("reinforce_plus_plus")
class ReinforcePlusPlus(PolicyGradient):
    """Advantage: the discounted rewards to go, whitened over all tokens of the batch. No critic, no groups."""

    samples_per_prompt: ClassVar[int] = 1

    gamma: Share = 1.0

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        returns = discounted_returns(e.token_rewards, e.episodes.trajectories, self.gamma)
        return {"advantages": whiten(returns, e.responses.trained)}


@register_algorithm("reinforce_plus_plus_baseline")
class ReinforcePlusPlusBaseline(PolicyGradient):
    """Advantage: the reward minus the group's mean, whitened over all tokens of the batch."""

    needs_groups = True

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        centred = e.responses.spread(group_centred(e.outcome, e.responses.groups))
        return {"advantages": whiten(centred, e.responses.trained)}
