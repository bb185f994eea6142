"""GPG: Chu et al., "GPG: A Simple and Strong Reinforcement Learning Baseline" (arXiv:2504.02546).

Deviation, as in verl: advantages are multiplied by rows / rows whose reward is not 0 (before a KL penalty); the paper's
factor is rows / rows of groups whose rewards differ.
"""

from __future__ import annotations

from torch import Tensor

from verl.algorithms.advantages import gpg
from verl.algorithms.losses import PolicyLoss, PolicyTerms, reinforce_loss
from verl.algorithms.policy import Experience, PolicyGradient
from verl.algorithms.registry import register_algorithm
from verl.record import Positive


@register_algorithm("gpg")
class GPG(PolicyGradient):
    """Plain policy gradient, no ratio: centred rewards, scaled up for rows that carry no signal."""

    needs_groups = True
    zero_where_alike = True
    has_ratio = False
    no_gradient_at_zero = True
    unread = dict.fromkeys(
        ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"), "its loss has no ratio to clip"
    )

    f_norm: Positive = 1.0

    @property
    def needs_old_log_probs(self) -> bool:
        return self.rollout_is is not None or self.rollout_rs is not None  # there is no ratio beside the correction

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        raw_rewards = self.outcome_rewards(e.batch)
        return {"advantages": e.responses.spread(gpg(e.outcome, e.responses.groups, self.f_norm, raw_rewards))}

    def policy_loss(self, t: PolicyTerms) -> PolicyLoss:
        return reinforce_loss(t)
