"""ORPO: Hong et al., "Monolithic Preference Optimization without Reference Model" (arXiv:2403.07691), eq. 6 and 7.

Deviations. The likelihood term is a mean over all tokens of the mini-batch's chosen responses; the paper's is a mean
over responses of each one's mean, so that a token of a short response counts for more there. It does not count the
prompt's tokens, as TRL's does and the paper's does not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from verl.algorithms.aggregation import aggregation_weights
from verl.algorithms.base import Loss, LossInput
from verl.algorithms.pairs import WithoutReference
from verl.algorithms.registry import register_algorithm
from verl.algorithms.responses import Responses
from verl.autograd import bounded
from verl.batch import Batch


@register_algorithm("orpo")
class ORPO(WithoutReference):
    """No reference: the chosen response's likelihood, and `beta` times the log-sigmoid of the log odds ratio."""

    def token_weights(self, batch: Batch) -> Tensor:
        """One over the tokens of all chosen responses; 0 on the rejected."""
        responses = Responses(batch)
        chosen = responses.spread(batch.tensor("label", torch.float64)) > 0.5
        return aggregation_weights(responses.written & chosen, responses.sequence, responses.rows)

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
        return -self.beta * logsigmoid(log_odds)

    def compute_loss(self, x: LossInput) -> Loss:
        loss = super().compute_loss(x)
        likelihood = -(x.weights * torch.where(x.weights != 0, self.needed_log_probs(x), 0.0)).sum()
        return Loss(total=loss.total + likelihood, metrics={**loss.metrics, "loss/sft": likelihood.detach()})


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x <= 0, finite at 0, with a gradient there."""
    return torch.log1p(-bounded(x, -math.inf, -1e-7).exp())
