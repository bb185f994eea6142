"""RLOO: Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization" (arXiv:2402.14740).

Deviation, as in verl: the loss is PPO's clipped one, which on the first step of a batch is plain REINFORCE. With
`ratio_of="sequence"` the ratio is that of the whole response, as in the paper.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from verl.algorithms.advantages import rloo
from verl.algorithms.losses import PolicyLoss, PolicyTerms
from verl.algorithms.policy import Experience, PolicyGradient
from verl.algorithms.registry import register_algorithm
from verl.record import NotNegative


@register_algorithm("rloo")
class RLOO(PolicyGradient):
    """Advantage: the reward minus the mean reward of the group's other samples.

    Options:
        ratio_of: what the ratio of the loss is of: a "token", or the "sequence", whose loss is then one number that all
            of its tokens have.
        std_epsilon: divide advantages by their standard deviation over all samples, plus this; None: not.
    """

    needs_groups = True
    no_gradient_at_zero = True
    zero_where_alike = True

    ratio_of: Literal["token", "sequence"] = "token"
    std_epsilon: NotNegative | None = None

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        advantages = rloo(e.outcome, e.responses.groups)
        if self.std_epsilon is not None and len(advantages) > 1:
            advantages = advantages / (advantages.std() + self.std_epsilon)
        return {"advantages": e.responses.spread(advantages)}

    def ratio(self, t: PolicyTerms) -> Tensor:
        return super().ratio(self._terms(t))

    def policy_loss(self, t: PolicyTerms) -> PolicyLoss:
        return super().policy_loss(self._terms(t))

    def _terms(self, t: PolicyTerms) -> PolicyTerms:
        if self.ratio_of == "token":
            return t
        # The row's value at each token, and through a token's own log-prob its part of the row's gradient: times the
        # number of tokens, for the mean over them that "seq-mean-token-mean" takes.
        row, tokens = t.row_sum(t.log_ratio).detach(), t.row_sum(torch.ones_like(t.log_probs)).detach()
        return replace(t, log_ratio=row + tokens * (t.log_probs - t.log_probs.detach()))
