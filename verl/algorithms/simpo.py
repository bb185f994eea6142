"""SimPO: Meng et al., "Simple Preference Optimization with a Reference-Free Reward" (arXiv:2405.14734), equation 6."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from verl.algorithms.pairs import WithoutReference
from verl.algorithms.registry import register_algorithm
from verl.record import NotNegative, Positive


@register_algorithm("simpo")
class SimPO(WithoutReference):
    """No reference: log-probs per token, with a target margin of `gamma` (in units of the implicit reward)."""

    beta: Positive = 2.0
    gamma: NotNegative = 0.5

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -logsigmoid(self.beta * (chosen - rejected) - self.gamma)
