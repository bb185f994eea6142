"""Preference optimisation against a reference: DPO and IPO.

DPO: Rafailov et al. (arXiv:2305.18290), equation 7; its hinge form is SLiC's (arXiv:2305.10425). IPO: Azar et al.
(arXiv:2310.12036), equation 17, with log-ratios per token as its authors compute them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from verl.algorithms.base import LossInput
from verl.algorithms.pairs import PreferenceAlgorithm, sequence_tokens
from verl.algorithms.registry import register_algorithm
from verl.errors import ConfigError


@register_algorithm("dpo")
class DPO(PreferenceAlgorithm):
    """Options: loss_type: "sigmoid" or "hinge"; label_smoothing: probability that a label is wrong, corrected for
    without bias (robust DPO, arXiv:2403.00409)."""

    loss_type: Literal["sigmoid", "hinge"] = "sigmoid"
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing and self.loss_type == "hinge":
            raise ConfigError("dpo: label_smoothing is for loss_type='sigmoid', not 'hinge'")

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        margin = self.beta * (chosen - rejected)
        if self.loss_type == "hinge":
            return relu(1 - margin)
        noise = self.label_smoothing
        return (noise * logsigmoid(-margin) - (1 - noise) * logsigmoid(margin)) / (1 - 2 * noise)


@register_algorithm("ipo")
class IPO(PreferenceAlgorithm):
    """The margin of log-ratios per token regresses to 1 / (2 beta)."""

    def scores(self, x: LossInput, log_probs: Tensor) -> Tensor:
        return super().scores(x, log_probs) / sequence_tokens(x)

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (chosen - rejected - 1 / (2 * self.beta)).square()
