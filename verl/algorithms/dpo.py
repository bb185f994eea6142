"""Preference optimisation against a reference: DPO with the losses that followed it.

With a and b the log-ratios of the chosen and the rejected response to the reference, each times `beta`, and e the
`label_smoothing`:

    sigmoid       -log s(a - b); with e the unbiased loss under wrong labels: Rafailov et al. (arXiv:2305.18290) eq. 7,
                  robust DPO (arXiv:2403.00409)
    sigmoid_norm  the same of log-ratios per token (arXiv:2411.15124)
    hinge         max(0, 1 - (a - b)): SLiC (arXiv:2305.10425), RSO (arXiv:2309.06657)
    exo_pair      KL of (s(a - b), s(b - a)) to (1 - e, e): EXO (arXiv:2402.00856) eq. 16
    nca_pair      -log s(a) - (log s(-a) + log s(-b)) / 2: NCA (arXiv:2402.05369), for pairs
    bco_pair      -log s(a) - log s(-b): BCO (arXiv:2404.04656) without its reward shift, as TRL has it
    sppo_hard     ((a - 1/2)^2 + (b + 1/2)^2) / beta^2: SPPO (arXiv:2405.00675) eq. 4.7, chances of 1 and 0
    apo_zero      1 - s(a) + s(b): APO (arXiv:2408.06266) eq. 7
    apo_down      s(a) + 1 - s(a - b): the same, eq. 8
    discopop      DPO's loss and exp(b - a), mixed by s((a - b) / tau): DiscoPOP (arXiv:2406.08414) eq. 5
    aot           as sigmoid, of sorted margins less sorted margins of the reference: AOT (arXiv:2406.05882)

AOT sorts the margins of a step's whole batch, before its update: no split can change a loss, where TRL sorts each
micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from verl._base.autograd import sum_rows
from verl._base.record import Positive
from verl.algorithms.base import LossInput
from verl.algorithms.pairs import PreferenceAlgorithm, sequence_tokens
from verl.algorithms.registry import register_algorithm
from verl.algorithms.responses import Responses
from verl.batch import Batch
from verl.errors import ConfigError

#: Loss of a pair from a and b `[G]`, of those without options.
_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hinge": lambda a, b: relu(1 - (a - b)),
    "nca_pair": lambda a, b: -logsigmoid(a) - 0.5 * (logsigmoid(-a) + logsigmoid(-b)),
    "bco_pair": lambda a, b: -logsigmoid(a) - logsigmoid(-b),
    "apo_zero": lambda a, b: 1 - torch.sigmoid(a) + torch.sigmoid(b),
    "apo_down": lambda a, b: torch.sigmoid(a) + 1 - torch.sigmoid(a - b),
}
_SMOOTHED = ("sigmoid", "sigmoid_norm", "exo_pair", "aot")


@register_algorithm("dpo")
class DPO(PreferenceAlgorithm):
    """Options: loss_type: see the module; label_smoothing: probability that a label is wrong; discopop_tau: of
    "discopop"."""

    read_with: ClassVar = {"discopop_tau": ("loss_type", "discopop")}

    loss_type: Literal[
        "sigmoid", "sigmoid_norm", "hinge", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
        "discopop", "aot",
    ] = "sigmoid"  # fmt: skip
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    discopop_tau: Positive = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing and self.loss_type not in _SMOOTHED:
            raise ConfigError(
                f"dpo: label_smoothing is for loss_type {', '.join(map(repr, _SMOOTHED))}, not '{self.loss_type}'"
            )
        if not self.label_smoothing and self.loss_type == "exo_pair":
            raise ConfigError("dpo: loss_type='exo_pair' needs label_smoothing above 0, such as 0.001")

    @property
    def needs_log_probs(self) -> bool:  # type: ignore[override]
        return self.loss_type == "aot"

    @property
    def loss_columns(self) -> tuple[str, ...]:
        return (*super().loss_columns, *(("aot_shift",) if self.loss_type == "aot" else ()))

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        batch, metrics = super().prepare(batch)
        return (_with_shift(batch) if self.loss_type == "aot" else batch), metrics

    def scores(self, x: LossInput, log_probs: Tensor) -> Tensor:
        scores = super().scores(x, log_probs)
        if self.loss_type == "sigmoid_norm":
            return scores / sequence_tokens(x)
        return scores + x.columns["aot_shift"] if self.loss_type == "aot" else scores

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        a, b, noise = self.beta * chosen, self.beta * rejected, self.label_smoothing
        if self.loss_type in _LOSSES:
            return _LOSSES[self.loss_type](a, b)
        if self.loss_type == "sppo_hard":
            return (chosen - 0.5 / self.beta).square() + (rejected + 0.5 / self.beta).square()
        likely, unlikely = logsigmoid(a - b), logsigmoid(b - a)
        if self.loss_type == "exo_pair":
            return likely.exp() * (likely - math.log1p(-noise)) + unlikely.exp() * (unlikely - math.log(noise))
        if self.loss_type == "discopop":
            mixed = torch.sigmoid((a - b) / self.discopop_tau)
            return mixed * (b - a).exp() - (1 - mixed) * likely
        if self.loss_type == "aot":
            return -(1 - noise) * likely - noise * unlikely
        return (noise * unlikely - (1 - noise) * likely) / (1 - 2 * noise)


def _with_shift(batch: Batch) -> Batch:
    """Column `aot_shift`: what makes the margin of the log-ratios of a pair that of the policy alone, less the
    reference's margin of the same rank; at the chosen row, 0 at the other."""
    responses = Responses(batch)
    labels = batch.tensor("label", torch.float64)
    sign = torch.where(labels > 0.5, 1.0, -1.0).double()

    def margins(column: str) -> Tensor:
        sums = responses.sum(torch.where(responses.written, responses.tokens(column), 0.0))
        groups = responses.groups
        return sum_rows(sign * sums, groups, int(groups.max()) + 1)

    policy, reference = margins("log_probs"), margins("ref_log_probs")
    rank = policy.argsort(stable=True).argsort()
    shift = (reference - reference.sort().values[rank])[responses.groups]
    return batch.add({"aot_shift": torch.where(labels > 0.5, shift, 0.0)})
