"""GRPO: Shao et al., "DeepSeekMath" (arXiv:2402.03300).

Deviations: "token-mean" aggregation as in verl (the paper's is "seq-mean-token-mean"), and no KL term unless
`kl_in="loss"` (the paper's): most users train without a reference model today.
"""

from __future__ import annotations

from torch import Tensor

from verl.algorithms.advantages import grpo
from verl.algorithms.policy import Experience, PolicyGradient
from verl.algorithms.registry import register_algorithm


@register_algorithm("grpo")
class GRPO(PolicyGradient):
    """Advantage: the reward, centred and scaled (`norm_adv_by_std`) within the group of samples of one prompt."""

    needs_groups = True
    zero_where_alike = True

    norm_adv_by_std: bool = True

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        return {"advantages": e.responses.spread(grpo(e.outcome, e.responses.groups, self.norm_adv_by_std))}
