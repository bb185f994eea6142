"""Preference pairs: what their losses share, and those with one formula; `dpo` has the others.

A pair is a group of two rows, one with label 1 (chosen), one with 0 (rejected); a loss is the mean over the pairs of
the mini-batch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from verl._base.autograd import bounded
from verl._base.record import NotNegative, Positive
from verl.algorithms.aggregation import aggregation_weights
from verl.algorithms.base import NOT_BY_TOKEN, BaseAlgorithm, Loss, LossInput, present
from verl.algorithms.episodes import one_trajectory
from verl.algorithms.registry import register_algorithm
from verl.algorithms.responses import Responses
from verl.batch import Batch
from verl.errors import DataError


def only_pairs(batch: Batch) -> tuple[Batch, dict[str, float]]:
    """The rows that form pairs, and how many rows do not (a missing partner, equal labels, a third row).

    Raises:
        DataError: no column `label`, no pair at all, or none whose responses differ.
    """
    labels = batch.tensor("label", torch.float64).tolist()
    paired, pairs = [False] * len(batch), []
    for rows in batch.group_indices():
        if sorted(labels[row] for row in rows) == [0.0, 1.0]:
            paired[rows[0]] = paired[rows[1]] = True
            pairs.append(rows)
    dropped = paired.count(False)
    if dropped == len(paired):
        raise DataError(
            f"none of {len(paired)} rows belongs to a preference pair: a pair is a group (column 'group') of two rows, "
            "one with label 1 and one with label 0"
        )
    # The loss says nothing of what is in such pairs: its gradient is rounding.
    for responses in (batch.lengths("response_tokens"), batch["response_tokens"]):
        if any(responses[a] != responses[b] for a, b in pairs):
            break
    else:
        raise DataError(f"the two responses of each of {len(pairs)} pairs are the same tokens: no preference is there")
    return (batch.filter(paired) if dropped else batch), {"pairs/dropped_rows": float(dropped)}


def pairs_by_reward(batch: Batch) -> Batch:
    """From each group of samples the one with the highest reward, with `label` 1, and the one with the lowest, with 0.

    Groups with a single finite reward, or of equal ones, say nothing and are left out. As online DPO forms its pairs
    (arXiv:2402.04792), of two samples there.

    Raises:
        DataError: no column `reward`, or no group with two different rewards.
    """
    rewards, scored = batch.tensor("reward", torch.float64), present(batch)
    label: dict[int, float] = {}
    for group in batch.group_indices():
        rows = sorted((row for row in group if scored[row]), key=lambda row: float(rewards[row]))
        if rows and rewards[rows[0]] < rewards[rows[-1]]:
            label |= {rows[0]: 0.0, rows[-1]: 1.0}
    if not label:
        raise DataError(
            f"no pairs among {len(batch)} samples: a pair is two samples of one prompt with different rewards, so "
            "sample at least two a prompt (n=2)"
        )
    chosen = sorted(label)
    return batch.take(chosen).add({"label": [label[row] for row in chosen]})


def split_pairs(x: LossInput, values: Tensor) -> tuple[Tensor, Tensor]:
    """`[S]` -> (chosen `[G]`, rejected `[G]`) of the G pairs of this micro-batch, in the same order."""
    order = torch.argsort(x.columns["label"], descending=True, stable=True)
    order = order[torch.argsort(x.columns["group"][order], stable=True)]
    return values[order[0::2]], values[order[1::2]]


def accuracy(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Pairs of `[G]` whose chosen response wins, ties half: a model without a preference has one half of them. In fp64,
    so that parts of a share add up to 1 at most."""
    return (chosen > rejected).sum().double() + 0.5 * (chosen == rejected).sum()


def sequence_log_probs(x: LossInput, log_probs: Tensor) -> Tensor:
    """`[R]` -> `[S]`: the sum of each row's written tokens."""
    return x.sum_by_sequence(torch.where(x.mask, log_probs, 0.0))


def sequence_tokens(x: LossInput) -> Tensor:
    """`[S]`: written tokens of each row, at least 1."""
    return x.sum_by_sequence(x.mask.to(x.weights.dtype)).clamp(min=1)


class PreferenceAlgorithm(BaseAlgorithm):
    """Base of the pair losses of language models. `beta` scales the implicit reward."""

    unread = NOT_BY_TOKEN
    online: ClassVar[bool] = False
    coupled: ClassVar[bool] = True
    samples_per_prompt: ClassVar[int] = 2

    beta: Positive = 0.1

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

    def extend(self, batch: Batch) -> Batch:
        """Samples with rewards instead of labels become pairs, see `pairs_by_reward`."""
        batch = one_trajectory(batch, self.name)
        return pairs_by_reward(batch) if "label" not in batch and "reward" in batch else batch

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        return only_pairs(batch)

    def compute_loss(self, x: LossInput) -> Loss:
        chosen, rejected = split_pairs(x, self.scores(x, self.needed_log_probs(x)))
        pairs = max(x.total_groups, 1)
        metrics = {
            "pairs/accuracy": accuracy(chosen, rejected) / pairs,
            "pairs/margin": self.beta * (chosen - rejected).detach().sum() / pairs,
            "pairs/chosen": self.beta * chosen.detach().sum() / pairs,
            "pairs/rejected": self.beta * rejected.detach().sum() / pairs,
        }
        return Loss(total=self.pair_losses(chosen, rejected).sum() / pairs, metrics={**metrics})


class WithoutReference(PreferenceAlgorithm):
    """Base of those that compare log-probs per token instead."""

    roles = frozenset({"actor"})

    def scores(self, x: LossInput, log_probs: Tensor) -> Tensor:
        return sequence_log_probs(x, log_probs) / sequence_tokens(x)


@register_algorithm("ipo")
class IPO(PreferenceAlgorithm):
    """The margin of log-ratios per token regresses to 1 / (2 beta): Azar et al. (arXiv:2310.12036, equation 17), with
    log-ratios per token as its authors compute them."""

    def scores(self, x: LossInput, log_probs: Tensor) -> Tensor:
        return super().scores(x, log_probs) / sequence_tokens(x)

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (chosen - rejected - 1 / (2 * self.beta)).square()


@register_algorithm("simpo")
class SimPO(WithoutReference):
    """No reference: log-probs per token, with a target margin of `gamma` (in units of the implicit reward). Meng et
    al., "Simple Preference Optimization with a Reference-Free Reward" (arXiv:2405.14734, equation 6)."""

    beta: Positive = 2.0
    gamma: NotNegative = 0.5

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -logsigmoid(self.beta * (chosen - rejected) - self.gamma)


@register_algorithm("orpo")
class ORPO(WithoutReference):
    """No reference: the chosen response's likelihood, and `beta` times the log-sigmoid of the log odds ratio. Hong et
    al., "Monolithic Preference Optimization without Reference Model" (arXiv:2403.07691, equations 6 and 7).

    Deviations. The likelihood term is a mean over all tokens of the mini-batch's chosen responses; the paper's is a
    mean over responses of each one's mean, so that a token of a short response counts for more there. It does not count
    the prompt's tokens, as TRL's does and the paper's does not.
    """

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


@register_algorithm("reward_model")
class RewardModel(BaseAlgorithm):
    """-log sigmoid(chosen - rejected), averaged over pairs: the Bradley-Terry likelihood of preferences
    (arXiv:2203.02155, equation 1).

    Options:
        center_rewards_coefficient: weight of (chosen + rejected)^2, which keeps scores near 0 (arXiv:2312.09244).
    """

    roles = frozenset({"actor"})
    loss_columns = ("group", "label")
    unread = NOT_BY_TOKEN
    online: ClassVar[bool] = False
    coupled: ClassVar[bool] = True
    head: ClassVar[Literal["lm", "score"]] = "score"

    center_rewards_coefficient: NotNegative = 0.0

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        return only_pairs(one_trajectory(batch, self.name))

    def compute_loss(self, x: LossInput) -> Loss:
        if x.scores is None:
            raise DataError("reward_model needs scores: train it with a score head")
        chosen, rejected = split_pairs(x, x.scores)
        pairs = max(x.total_groups, 1)
        total = -logsigmoid(chosen - rejected).sum() / pairs
        total = total + self.center_rewards_coefficient * (chosen + rejected).square().sum() / pairs
        metrics = {
            "pairs/accuracy": accuracy(chosen, rejected) / pairs,
            "pairs/margin": (chosen - rejected).detach().sum() / pairs,
        }
        return Loss(total=total, metrics={**metrics})
