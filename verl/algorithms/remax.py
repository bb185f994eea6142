"""ReMax: Li et al., "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method" (arXiv:2310.10505).

The greedy sample of each prompt is part of the same rollout. Where its reward abstained there is no baseline,
so the group does not train. Deviation, as in verl: the loss is PPO's clipped one, which on the first step of a batch is
plain REINFORCE.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from verl.algorithms.advantages import discounted_returns, group_sums
from verl.algorithms.base import present
from verl.algorithms.episodes import Episodes
from verl.algorithms.policy import Experience, PolicyGradient
from verl.algorithms.registry import register_algorithm
from verl.batch import Batch


@register_algorithm("remax")
class ReMax(PolicyGradient):
    """Advantage: the rewards to go minus the reward of the prompt's greedy response."""

    greedy_baseline: ClassVar[bool] = True
    samples_per_prompt: ClassVar[int] = 1

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        episodes = Episodes(batch)
        greedy = episodes.batch.tensor("baseline") != 0
        rewards = self.outcome_rewards(episodes.batch)
        usable = greedy & present(episodes.batch)
        groups = episodes.responses.groups
        count = group_sums(usable.double(), groups)
        baseline = group_sums(torch.where(usable, rewards, 0.0), groups) / count.clamp(min=1)
        train = ~greedy & (count > 0)
        number = episodes.number
        batch = batch.add({"reward_baseline": baseline[number]}).filter(train[number].tolist())
        batch, metrics = super().prepare(batch)
        without = int((~greedy & (count == 0)).sum())
        mean = float(rewards[usable].mean()) if usable.any() else 0.0
        return batch, {**metrics, "remax/baseline_reward": mean, "remax/without_baseline": float(without)}

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        returns = discounted_returns(e.token_rewards, e.episodes.trajectories)
        baseline = e.batch.tensor("reward_baseline", torch.float64)
        return {"advantages": returns - e.responses.spread(baseline)}
