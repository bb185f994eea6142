"""GRPO: Shao et al., "DeepSeekMath" (arXiv:2402.03300).

Deviations: "token-mean" aggregation as in verl (the paper's is "seq-mean-token-mean"), and no KL term unless
`kl_in="loss"` (the paper's): most users train without a reference model today.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from verl.algorithms.advantages import STD_EPSILON, grpo
from verl.algorithms.policy import Experience, PolicyGradient
from verl.algorithms.registry import register_algorithm
from verl.record import Positive


@register_algorithm("grpo")
class GRPO(PolicyGradient):
    """Advantage: the reward, centred within the group of samples of one prompt, and scaled.

    Options:
        norm_adv_by_std: divide by the standard deviation of the group; "batch": of all rewards; false: not at all.
        std_epsilon: added to it.
    """

    needs_groups = True
    zero_where_alike = True

    norm_adv_by_std: bool | Literal["batch"] = True
    std_epsilon: Positive = STD_EPSILON

    @property
    def unread_options(self) -> dict[str, str]:
        unread = super().unread_options
        if not self.norm_adv_by_std:
            unread["std_epsilon"] = "nothing is divided: set norm_adv_by_std, or leave it out"
        return unread

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        advantages = grpo(e.outcome, e.responses.groups, self.norm_adv_by_std, self.std_epsilon)
        return {"advantages": e.responses.spread(advantages)}
