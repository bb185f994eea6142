"""Policy and value losses per token: pure, differentiable functions on the flat tokens of one micro-batch; and the
weights over the whole mini-batch that make them one number, `loss = (weights * per_token).sum()`.

Shapes: R response tokens of S rows. Losses that are one number a row in their paper are spread over the row's tokens,
so that the same weights serve: "seq-mean-token-mean" is then the mean over rows. Rows are never cut, so a row's
statistics are whole in every micro-batch.

Every mode divides by counts of the whole mini-batch on all ranks, so neither micro-batches nor ranks can change a
gradient. Modes and names are verl's; rows without a counted token are not counted as sequences.

Deviation: "seq-mean-token-sum-norm" without `loss_scale_factor` divides by the longest response of the
mini-batch, since there is no padded width here. Set the factor to the most new tokens for a constant norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from verl._base.autograd import bounded, sum_rows
from verl.algorithms.kl import MAX_LOG_RATIO

AggregationMode: TypeAlias = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


@dataclass(frozen=True)
class PolicyTerms:
    """The terms of a policy loss; all `[R]`, and 0 where `active` is not set: such tokens cannot spoil a row.

    Attributes:
        log_probs: of the policy now, with gradient.
        log_ratio: log-probs now minus old ones, with gradient.
        advantages: detached.
        active: bool, tokens that count.
        sequence: int64, the row of each token; `num_sequences` is S.
    """

    log_probs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    active: Tensor
    sequence: Tensor
    num_sequences: int

    def row_sum(self, values: Tensor) -> Tensor:
        """`[R]` -> `[R]`: at each token the sum over its row's active tokens."""
        return sum_rows(values * self.active, self.sequence, self.num_sequences)[self.sequence]

    def row_mean(self, values: Tensor) -> Tensor:
        """`[R]` -> `[R]`: at each token the mean over its row's active tokens, 0 without any."""
        active = self.active.to(values.dtype)
        total, count = (sum_rows(x, self.sequence, self.num_sequences) for x in (values * active, active))
        return (total / count.clamp(min=1))[self.sequence]


@dataclass(frozen=True)
class PolicyLoss:
    """Loss per token `[R]`, and where clipping took the gradient away: on positive and on negative advantages."""

    per_token: Tensor
    clipped: Tensor | None = None
    clipped_lower: Tensor | None = None


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """The ratio of a log-ratio, the shape of it. Beyond `MAX_LOG_RATIO` its value stays, and so does its gradient."""
    return bounded(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_loss(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None) -> PolicyLoss:
    """PPO's clipped objective (arXiv:1707.06347, equation 7), ratio kept in [1 - low, 1 + high].

    With `dual` (> 1), tokens of negative advantage lose at most `dual * |advantage|` (arXiv:1912.09729, equation 5).
    """
    free = -advantages * ratio
    kept = -advantages * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(free, kept)
    if dual is None:
        return PolicyLoss(loss, kept > free)
    # Where the advantage is negative a growing ratio makes the loss grow without bound, which the clip does not stop.
    most = -advantages * dual
    negative = advantages < 0
    return PolicyLoss(torch.where(negative, torch.minimum(most, loss), loss), kept > free, negative & (loss > most))


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Half the squared error of values `[R]`; with `clip`, or of values kept within `clip` of the old ones, if that is
    larger (the value clipping of PPO's reference implementation).

    Returns:
        loss per token `[R]`, and where clipping took the gradient away, `[R]` bool.
    """
    free = (values - returns).square()
    if clip is None:
        return 0.5 * free, torch.zeros_like(free, dtype=torch.bool)
    clipped = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return 0.5 * torch.maximum(free, clipped), clipped > free


def aggregation_weights(
    mask: Tensor, sequence: Tensor, num_sequences: int, mode: AggregationMode, scale_factor: float | None = None
) -> Tensor:
    """Weight of each response token, `[R]` fp64; zero where `mask` is not set.

    Args:
        mask: `[R]` bool, tokens that count.
        sequence: `[R]` int64, the row of each token.
        num_sequences: S.
        mode: token-mean: 1 / all tokens. token-sum: 1. seq-mean-token-sum: 1 / sequences.
            seq-mean-token-mean: 1 / (sequences x tokens of the row).
            seq-mean-token-sum-norm: 1 / (sequences x scale_factor).
        scale_factor: of the last mode (Dr. GRPO's constant).
    """
    counted = mask.double()
    per_row = sum_rows(counted, sequence, num_sequences)
    sequences = (per_row > 0).sum().clamp(min=1).double()  # times an int64 a float would be rounded to fp32
    if mode == "token-mean":
        return counted / counted.sum().clamp(min=1)
    if mode == "token-sum":
        return counted
    if mode == "seq-mean-token-sum":
        return counted / sequences
    if mode == "seq-mean-token-mean":
        return counted / (per_row.clamp(min=1)[sequence] * sequences)
    longest = torch.bincount(sequence, minlength=1).max().clamp(min=1)
    return counted / (sequences * (scale_factor or longest))
