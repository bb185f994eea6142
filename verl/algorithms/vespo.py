"""VESPO: "Variational Sequence-Level Soft Policy Optimization" (arXiv:2602.10693).

Deviation: weights between the engine's and the trainer's log-probs multiply each token's loss, as elsewhere here; the
paper's ratio of a sequence has them within.
"""

from __future__ import annotations

from verl.algorithms.grpo import GRPO
from verl.algorithms.losses import PolicyLoss, PolicyTerms, vespo_loss
from verl.algorithms.policy import NO_CLIP
from verl.algorithms.registry import register_algorithm
from verl.record import NotNegative, Positive


@register_algorithm("vespo")
class VESPO(GRPO):
    """GRPO's advantages; REINFORCE weighted by a gamma-shaped function of the row's ratio, 1 where the ratio is 1.

    Options:
        k_pos, k_neg: power of the ratio; lambda_pos, lambda_neg: its exponential decay; for advantages from 0 on, and
            negative ones.
    """

    unread = NO_CLIP
    no_gradient_at_zero = True

    k_pos: NotNegative = 2.0
    lambda_pos: Positive = 3.0
    k_neg: NotNegative = 3.0
    lambda_neg: Positive = 2.0

    def policy_loss(self, t: PolicyTerms) -> PolicyLoss:
        return vespo_loss(t, (self.k_pos, self.lambda_pos), (self.k_neg, self.lambda_neg))
