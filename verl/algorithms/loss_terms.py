"""Inputs and results of loss functions.

Shapes: R response tokens and S rows (sequences) of one micro-batch; tokens are flat, row after row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from torch import Tensor

from verl._base.autograd import sum_rows
from verl._base.checked import hinted
from verl.batch import Batch


@hinted
@dataclass(frozen=True, kw_only=True)
class LossInput:
    """The response tokens of one micro-batch, with the counts of the whole mini-batch that it was cut from.

    A loss is additive over micro-batches and ranks: a sum over what is here, divided by counts of the whole
    mini-batch on all ranks (`weights` has the division done). Then no split can change the gradient.

    Attributes:
        log_probs: `[R]`, with gradient: log-probs of the response tokens, of temperature-scaled logits (an LM head).
            This, the entropy and columns of log-probs are 0 where `mask` is False: the head skips these tokens.
        entropy: `[R]`, with gradient: entropy, in nats, of the distribution of each token; None unless the loss needs
            it. Without a gradient where only `LossNeeds.statistics` asks for it.
        mean_logits: `[R]`: the mean over the vocabulary of the logits of each token; None unless statistics are asked
            for.
        is_top: `[R]`: 1 where no token of the vocabulary is likelier than the response's, else 0; None as
            `mean_logits`.
        values: `[R]`, with gradient: value of the state before each response token (a critic's head).
        scores: `[S]`, with gradient: one number a row (a reward model's head).
        weights: `[R]`: aggregation weights over the mini-batch on all ranks: `loss = (weights * per_token).sum()`.
        mask: `[R]` bool: the `response_mask`; False on tokens the policy did not write.
        sequence: `[R]` int64: the row, 0..S-1, of each token.
        num_sequences: S.
        total_sequences: rows of the whole mini-batch on all ranks.
        total_tokens: tokens with `mask` set in the whole mini-batch on all ranks.
        total_active: tokens with a weight other than 0 in the whole mini-batch on all ranks: without those that were
            rejected.
        total_groups: groups of the whole mini-batch on all ranks.
        computed_tokens: of `total_active` those in rows that are computed, for the means of metrics; without it, all.
        computed_sequences: of `total_sequences` those that are computed; see `verl.training.micro_batch`.
        columns: number columns of the batch: token-aligned `[R]`, one a row `[S]`; `group` as an int64 index `[S]`.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None
    weights: Tensor
    mask: Tensor
    sequence: Tensor
    num_sequences: int
    total_sequences: int
    total_tokens: int
    total_active: int
    total_groups: int
    computed_tokens: int = -1
    computed_sequences: int = -1
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.computed_tokens < 0:
            object.__setattr__(self, "computed_tokens", self.total_active)
        if self.computed_sequences < 0:
            object.__setattr__(self, "computed_sequences", self.total_sequences)

    def sum_by_sequence(self, values: Tensor) -> Tensor:
        """`[R]` -> `[S]`: the sum over each row's tokens (0 for an empty response). Differentiable."""
        return sum_rows(values, self.sequence, self.num_sequences)


@hinted
@dataclass(kw_only=True)
class Loss:
    """The loss of one micro-batch.

    `metrics` are additive like `total` (divided by the mini-batch's counts); those whose key ends in `/max`
    combine by maximum instead.
    """

    total: Tensor
    metrics: dict[str, Tensor | float] = field(default_factory=dict)

    def detached(self) -> Loss:
        metrics = {name: v.detach() if isinstance(v, Tensor) else v for name, v in self.metrics.items()}
        return Loss(total=self.total.detach(), metrics=metrics)


LossFn: TypeAlias = Callable[[LossInput], Loss]


@dataclass(frozen=True, kw_only=True)
class LossNeeds:
    """The inputs of a loss, besides weights.

    Attributes:
        columns: of the batch; those it lacks are absent from `LossInput.columns`.
        temperature: log-probs and entropies are of logits divided by it.
        entropy: whether the loss reads entropies.
        statistics: whether entropies, mean logits and top tokens are measured as well, without a gradient.
        coupled: rows of one `group` meet in one micro-batch.
        no_gradient_at_zero: a token of weight 0, or of advantage 0 where nothing but advantages count, has a gradient
            of exactly 0; see `BaseAlgorithm`.
    """

    columns: Sequence[str] = ()
    temperature: float = 1.0
    entropy: bool = False
    statistics: bool = False
    coupled: bool = False
    no_gradient_at_zero: bool = False

    @property
    def advantages_decide(self) -> bool:
        """Whether a token whose advantage is 0 has no gradient: only advantages count in the loss, no KL to a
        reference, whatever its coefficient, and no entropy bonus."""
        beside = self.entropy or self.coupled or "ref_log_probs" in self.columns
        return self.no_gradient_at_zero and "advantages" in self.columns and not beside


@dataclass(frozen=True)
class LossTerm:
    """One of the losses of an optimizer step, with the rows it is of.

    Attributes:
        rows: the mini-batch, of all ranks.
        loss: from the record of a micro-batch to its additive loss.
        weights: `[R]` aggregation weights of the response tokens of `rows`.
        skipped: rows that are not computed, because their gradient is known to be 0; ascending.
    """

    rows: Batch
    loss: LossFn
    weights: Tensor
    needs: LossNeeds = LossNeeds()
    skipped: Sequence[int] = ()

    @cached_property
    def computed(self) -> list[int]:
        """The other rows, ascending."""
        return sorted({*range(len(self.rows))}.difference(self.skipped))


def combine_metrics(parts: list[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Metrics of a mini-batch from its micro-batches: sums; maxima where the key ends in `/max`."""
    combined: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            number = float(value)
            known = combined.get(name, number if name.endswith("/max") else 0.0)
            combined[name] = max(known, number) if name.endswith("/max") else known + number
    return combined
