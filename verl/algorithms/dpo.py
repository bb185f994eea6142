"""Preference optimisation from pairs: DPO, IPO, SimPO and ORPO.

DPO: Rafailov et al. (arXiv:2305.18290), equation 7; its hinge form is SLiC's (arXiv:2305.10425). IPO: Azar et al.
(arXiv:2310.12036), equation 17, with log-ratios per token as its authors compute them. SimPO: Meng et al.
(arXiv:2405.14734), equation 6. ORPO: Hong et al. (arXiv:2403.07691), equations 6 and 7.

Deviation: ORPO's likelihood term counts the tokens of the chosen response; TRL's counts the prompt's too, which
the paper does not. All are means over the pairs of the mini-batch.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from verl.algorithms.aggregation import aggregation_weights
from verl.algorithms.base import BaseAlgorithm, Loss, LossInput
from verl.algorithms.pairs import only_pairs, sequence_log_probs, sequence_tokens, split_pairs
from verl.algorithms.registry import register_algorithm
from verl.algorithms.responses import Responses
from verl.batch import Batch
from verl.errors import ConfigError, DataError


class PreferenceAlgorithm(BaseAlgorithm):
    """Base of the pair losses. `beta` scales the implicit reward."""

    online: ClassVar[bool] = False
    coupled: ClassVar[bool] = True

    beta: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta > 0:
            raise ConfigError(f"algorithm '{self.name}', option 'beta' must be above 0, got {self.beta}")

    @property
    def roles(self) -> frozenset[str]:
        return frozenset({"actor", "reference"})

    @property
    def loss_columns(self) -> tuple[str, ...]:
        return ("group", "label", "ref_log_probs") if "reference" in self.roles else ("group", "label")

    @abstractmethod
    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """`[G]` losses from the pairs' scores `[G]`."""

    def scores(self, x: LossInput, log_probs: Tensor) -> Tensor:
        """`[S]`: the log-ratio of each row to the reference."""
        return sequence_log_probs(x, log_probs - x.columns["ref_log_probs"])

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        return only_pairs(batch)

    def compute_loss(self, x: LossInput) -> Loss:
        if x.log_probs is None:
            raise DataError(f"'{self.name}' needs log-probs: train it with a language-model head")
        chosen, rejected = split_pairs(x, self.scores(x, x.log_probs))
        pairs = max(x.total_groups, 1)
        metrics = {
            "pairs/accuracy": (chosen > rejected).sum() / pairs,
            "pairs/margin": self.beta * (chosen - rejected).detach().sum() / pairs,
            "pairs/chosen": self.beta * chosen.detach().sum() / pairs,
            "pairs/rejected": self.beta * rejected.detach().sum() / pairs,
        }
        return Loss(total=self.pair_losses(chosen, rejected).sum() / pairs, metrics={**metrics})


@register_algorithm("dpo")
class DPO(PreferenceAlgorithm):
    """Options: loss_type: "sigmoid" or "hinge"; label_smoothing: probability that a label is wrong, corrected for
    without bias (robust DPO, arXiv:2403.00409)."""

    loss_type: Literal["sigmoid", "hinge"] = "sigmoid"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 0.5 or (self.label_smoothing and self.loss_type == "hinge"):
            raise ConfigError("dpo: label_smoothing must be in [0, 0.5), and 0 with loss_type='hinge'")

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


@register_algorithm("simpo")
class SimPO(PreferenceAlgorithm):
    """No reference: log-probs per token, with a target margin of `gamma` (in units of the implicit reward)."""

    roles = frozenset({"actor"})

    beta: float = 2.0
    gamma: float = 0.5

    def scores(self, x: LossInput, log_probs: Tensor) -> Tensor:
        return sequence_log_probs(x, log_probs) / sequence_tokens(x)

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -logsigmoid(self.beta * (chosen - rejected) - self.gamma)


@register_algorithm("orpo")
class ORPO(SimPO):
    """No reference: the chosen response's likelihood, and `beta` times the log-sigmoid of the log odds ratio."""

    beta: float = 0.1

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
        assert x.log_probs is not None
        likelihood = -(x.weights * torch.where(x.weights != 0, x.log_probs, 0.0)).sum()
        return Loss(total=loss.total + likelihood, metrics={**loss.metrics, "loss/sft": likelihood.detach()})


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x <= 0, finite at 0."""
    return torch.log1p(-x.clamp(max=-1e-7).exp())
