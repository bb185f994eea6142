"""Preference pairs: the common part of their losses, DPO and its successors, losses without a reference, reward models.

A pair is a group of two rows, one with label 1 (chosen), one with 0 (rejected); a loss is the mean over the pairs of
the mini-batch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from verl._base.autograd import bounded, sum_rows
from verl._base.record import NotNegative, Positive
from verl.algorithms.base import NOT_BY_TOKEN, BaseAlgorithm, Loss, LossInput, present
from verl.algorithms.episodes import one_trajectory
from verl.algorithms.losses import aggregation_weights
from verl.algorithms.registry import register_algorithm
from verl.algorithms.responses import Responses
from verl.batch import Batch
from verl.errors import ConfigError, DataError

#: Loss of a pair from a and b `[G]`, of those without options.
_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hinge": lambda a, b: relu(1 - (a - b)),
    "nca_pair": lambda a, b: -logsigmoid(a) - 0.5 * (logsigmoid(-a) + logsigmoid(-b)),
    "bco_pair": lambda a, b: -logsigmoid(a) - logsigmoid(-b),
    "apo_zero": lambda a, b: 1 - torch.sigmoid(a) + torch.sigmoid(b),
    "apo_down": lambda a, b: torch.sigmoid(a) + 1 - torch.sigmoid(a - b),
}
_COLUMNS: tuple[str, ...] = ("group", "label")
_SMOOTHED = ("sigmoid", "sigmoid_norm", "exo_pair", "aot")


def split_pairs(x: LossInput, values: Tensor) -> tuple[Tensor, Tensor]:
    """`[S]` -> (chosen `[G]`, rejected `[G]`) of the G pairs of this micro-batch, in the same order."""
    # By group, the chosen row first: chosen rows are then at even positions.
    order = torch.argsort(x.columns["label"], descending=True, stable=True)
    order = order[torch.argsort(x.columns["group"][order], stable=True)]
    return values[order[0::2]], values[order[1::2]]


def compared(x: LossInput, scores: Tensor, beta: float = 1.0) -> tuple[Tensor, Tensor, dict[str, Tensor | float]]:
    """`split_pairs` of scores `[S]`, and how often and by how much, times `beta`, the chosen responses win."""
    chosen, rejected = split_pairs(x, scores)
    pairs = max(x.total_groups, 1)
    # Ties count half, as a model without a preference wins half. In fp64, so that parts of a share add up to 1 at most.
    wins = (chosen > rejected).sum().double() + 0.5 * (chosen == rejected).sum()
    margin = beta * (chosen - rejected).detach().sum()
    return chosen, rejected, {"pairs/accuracy": wins / pairs, "pairs/margin": margin / pairs}


def sequence_log_probs(x: LossInput, log_probs: Tensor) -> Tensor:
    """`[R]` -> `[S]`: the sum of each row's written tokens."""
    return x.sum_by_sequence(torch.where(x.mask, log_probs, 0.0))


def sequence_tokens(x: LossInput) -> Tensor:
    """`[S]`: written tokens of each row, at least 1."""
    return x.sum_by_sequence(x.mask.to(x.weights.dtype)).clamp(min=1)


class PairAlgorithm(BaseAlgorithm):
    """Base of the algorithms that learn from preference pairs."""

    loss_columns = _COLUMNS
    unread = NOT_BY_TOKEN
    online = False
    coupled = True

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The rows that form pairs, and how many rows do not (a missing partner, equal labels, a third row).

        Raises:
            DataError: no column `label`, no pair at all, or none whose responses differ.
        """
        batch = one_trajectory(batch, self.name)
        labels = batch.tensor("label", torch.float64).tolist()
        paired, pairs = [False] * len(batch), []
        for rows in batch.group_indices():
            if sorted(labels[row] for row in rows) == [0.0, 1.0]:
                paired[rows[0]] = paired[rows[1]] = True
                pairs.append(rows)
        dropped = paired.count(False)
        if dropped == len(paired):
            raise DataError(
                f"none of {len(paired)} rows belongs to a preference pair: a pair is a group (column 'group') of two "
                "rows, one with label 1 and one with label 0"
            )
        tokens = batch.arrow("response_tokens")
        # The loss says nothing of what is in such pairs: its gradient is rounding.
        if all(tokens[a] == tokens[b] for a, b in pairs):
            raise DataError(
                f"the two responses of each of {len(pairs)} pairs are the same tokens: no preference is there"
            )
        return (batch.filter(paired) if dropped else batch), {"pairs/dropped_rows": float(dropped)}


class PreferenceAlgorithm(PairAlgorithm):
    """Base of the pair losses of language models. `beta` scales the implicit reward."""

    roles = frozenset({"actor", "reference"})
    loss_columns = (*_COLUMNS, "ref_log_probs")
    samples_per_prompt = 2
    #: Whether scores are means over tokens.
    per_token = False

    beta: Positive = 0.1

    @abstractmethod
    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """`[G]` losses from the pairs' scores `[G]`."""

    def scores(self, x: LossInput, log_probs: Tensor) -> Tensor:
        """`[S]`: the log-ratio of each row to the reference, without one its log-prob; a mean if `per_token`."""
        if "reference" in self.roles:
            log_probs = log_probs - x.columns["ref_log_probs"]
        sums = sequence_log_probs(x, log_probs)
        return sums / sequence_tokens(x) if self.per_token else sums

    def extend(self, batch: Batch) -> Batch:
        """Samples with rewards instead of labels become pairs, as in online DPO (arXiv:2402.04792): from each group the
        one with the highest reward, with `label` 1, and the one with the lowest, with 0. Groups with a single finite
        reward, or of equal ones, say nothing and are left out.

        Raises:
            DataError: no group has two different rewards.
        """
        batch = one_trajectory(batch, self.name)
        if "label" in batch or "reward" not in batch:
            return batch
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

    def compute_loss(self, x: LossInput) -> Loss:
        chosen, rejected, metrics = compared(x, self.scores(x, self.needed_log_probs(x)), self.beta)
        pairs = max(x.total_groups, 1)
        metrics["pairs/chosen"] = self.beta * chosen.detach().sum() / pairs
        metrics["pairs/rejected"] = self.beta * rejected.detach().sum() / pairs
        return Loss(total=self.pair_losses(chosen, rejected).sum() / pairs, metrics=metrics)


@register_algorithm("dpo")
class DPO(PreferenceAlgorithm):
    """Preference optimisation against a reference: DPO with the losses that followed it.

    With a and b the log-ratios of the chosen and the rejected response to the reference, each times `beta`, and e the
    `label_smoothing`:

        sigmoid       -log s(a - b); with e the unbiased loss under wrong labels: Rafailov et al. (arXiv:2305.18290)
                      eq. 7, robust DPO (arXiv:2403.00409)
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

    Options:
        loss_type: see above.
        label_smoothing: probability that a label is wrong.
        discopop_tau: of "discopop".
    """

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
        self.per_token = self.loss_type == "sigmoid_norm"
        if self.loss_type == "aot":
            self.needs_log_probs, self.loss_columns = True, (*self.loss_columns, "aot_shift")

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """For AOT with a column `aot_shift`, at the chosen row: added to a pair's margin of log-ratios it gives the
        policy's own margin less the reference's margin of the same rank."""
        batch, metrics = super().prepare(batch)
        if self.loss_type != "aot":
            return batch, metrics
        responses, groups = Responses(batch), Responses(batch).groups
        labels = batch.tensor("label", torch.float64)
        sign = torch.where(labels > 0.5, 1.0, -1.0).double()
        of_rows = (torch.where(responses.written, responses.tokens(f"{of}log_probs"), 0.0) for of in ("", "ref_"))
        policy, reference = (sum_rows(sign * responses.sum(x), groups, int(groups.max()) + 1) for x in of_rows)
        # AOT compares sorted margins: a pair meets the reference's margin of its rank, not its own.
        rank = policy.argsort(stable=True).argsort()
        shift = (reference - reference.sort().values[rank])[groups]
        return batch.add({"aot_shift": torch.where(labels > 0.5, shift, 0.0)}), metrics

    def scores(self, x: LossInput, log_probs: Tensor) -> Tensor:
        scores = super().scores(x, log_probs)
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


class WithoutReference(PreferenceAlgorithm):
    """Base of those that compare log-probs per token."""

    roles = frozenset({"actor"})
    loss_columns = _COLUMNS
    per_token = True


@register_algorithm("ipo")
class IPO(PreferenceAlgorithm):
    """The margin of log-ratios per token regresses to 1 / (2 beta): Azar et al. (arXiv:2310.12036, equation 17), with
    log-ratios per token as its authors compute them."""

    per_token = True

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
        chosen = batch.tensor("label", torch.float64)[responses.sequence] > 0.5
        return aggregation_weights(responses.written & chosen, responses.sequence, responses.rows, "token-mean")

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        # log(1 - exp(x)) for x <= 0, finite at 0, with a gradient there.
        others = [torch.log1p(-bounded(x, -math.inf, -1e-7).exp()) for x in (chosen, rejected)]
        return -self.beta * logsigmoid((chosen - rejected) - (others[0] - others[1]))

    def compute_loss(self, x: LossInput) -> Loss:
        loss = super().compute_loss(x)
        likelihood = -(x.weights * torch.where(x.weights != 0, self.needed_log_probs(x), 0.0)).sum()
        return Loss(total=loss.total + likelihood, metrics={**loss.metrics, "loss/sft": likelihood.detach()})


@register_algorithm("reward_model")
class RewardModel(PairAlgorithm):
    """-log sigmoid(chosen - rejected), averaged over pairs: the Bradley-Terry likelihood of preferences
    (arXiv:2203.02155, equation 1).

    Options:
        center_rewards_coefficient: weight of (chosen + rejected)^2, which keeps scores near 0 (arXiv:2312.09244).
    """

    roles = frozenset({"actor"})
    head = "score"

    center_rewards_coefficient: NotNegative = 0.0

    def compute_loss(self, x: LossInput) -> Loss:
        if x.scores is None:
            raise DataError("reward_model needs scores: train it with a score head")
        chosen, rejected, metrics = compared(x, x.scores)
        pairs = max(x.total_groups, 1)
        total = -logsigmoid(chosen - rejected).sum() / pairs
        total = total + self.center_rewards_coefficient * (chosen + rejected).square().sum() / pairs
        return Loss(total=total, metrics=metrics)
