"""Policy and value losses per token: pure, differentiable functions on the flat tokens of one micro-batch.

Shapes: R response tokens of S rows. What is returned is a loss a token; aggregation weights (see `aggregation`)
make it one number. Losses that are one number a row in their paper are spread over the row's tokens, so that
the same weights serve: "seq-mean-token-mean" is then the mean over rows. Rows are never cut, so a row's statistics
are whole in every micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.kl import MAX_LOG_RATIO
from verl.autograd import bounded, sum_rows

_MAX_LOG_SEQUENCE_RATIO = 10.0
_MIN_LOG_SEQUENCE_RATIO = math.log(1e-8)


@dataclass(frozen=True)
class PolicyTerms:
    """What a policy loss is made of; all `[R]`, and 0 where `active` is not set: such tokens cannot spoil a row.

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
        """`[R]` -> `[R]`: at each token the mean over its row's active tokens (0 if there are none)."""
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


def clipped_loss(t: PolicyTerms, low: float, high: float, dual: float | None = None) -> PolicyLoss:
    """PPO's clipped objective (arXiv:1707.06347, equation 7), ratio kept in [1 - low, 1 + high].

    With `dual` (> 1), tokens of negative advantage lose at most `dual * |advantage|` (arXiv:1912.09729, equation 5).
    """
    ratio = bounded_ratio(t.log_ratio)
    free = -t.advantages * ratio
    clipped = -t.advantages * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(free, clipped)
    if dual is None:
        return PolicyLoss(loss, clipped > free)
    most = -t.advantages * dual
    negative = t.advantages < 0
    return PolicyLoss(torch.where(negative, torch.minimum(most, loss), loss), clipped > free, negative & (loss > most))


def gspo_loss(t: PolicyTerms, low: float, high: float) -> PolicyLoss:
    """GSPO (arXiv:2507.18071, equations 7 and 13): clipped by the length-normalised likelihood ratio of the row.

    The token form of the paper: value of the row's ratio, gradient through the token's own log-prob.
    """
    row = t.row_mean(t.log_ratio).detach()
    ratio = bounded(t.log_probs - t.log_probs.detach() + row, -math.inf, _MAX_LOG_SEQUENCE_RATIO).exp()
    free = -t.advantages * ratio
    clipped = -t.advantages * ratio.clamp(1 - low, 1 + high)
    return PolicyLoss(torch.maximum(free, clipped), clipped > free)


def cispo_loss(t: PolicyTerms, low: float, high: float) -> PolicyLoss:
    """CISPO (arXiv:2506.13585, equation 4): REINFORCE weighted by the clipped, detached ratio."""
    ratio = bounded_ratio(t.log_ratio.detach())
    weight = ratio.clamp(1 - low, 1 + high)
    return PolicyLoss(-weight * t.advantages * t.log_probs, ratio != weight)


def gmpo_loss(t: PolicyTerms, low: float, high: float) -> PolicyLoss:
    """GMPO (arXiv:2507.20673, equation 4): geometric mean of the row's ratios, log-ratios clipped to [-low, high].

    The row's advantage is the mean of its tokens' (they are equal in the paper).
    """
    sign = t.advantages.sign()
    free = bounded(t.log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    clipped = free.clamp(-low, high)
    log_ratio = sign * torch.minimum(sign * free, sign * clipped)
    loss = -t.row_mean(t.advantages) * t.row_mean(log_ratio).exp()
    outside = (free != clipped) & t.active
    return PolicyLoss(loss, outside & (sign > 0), outside & (sign < 0))


def sapo_loss(t: PolicyTerms, positive: float, negative: float) -> PolicyLoss:
    """SAPO (arXiv:2511.20347): the ratio r as 4 / T s(T (r - 1)), whose slope at 1 is 1, with the temperature T of the
    advantage's sign."""
    ratio = bounded_ratio(t.log_ratio)
    temperature = torch.where(t.advantages > 0, positive, negative).to(ratio.dtype)
    return PolicyLoss(-t.advantages * torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature)


def vespo_weights(t: PolicyTerms, positive: tuple[float, float], negative: tuple[float, float]) -> Tensor:
    """`[R]`: e^l w^k e^(-l w) of the likelihood ratio w of the row, detached.

    Args:
        positive, negative: (k, l) for advantages from 0 on, and for negative ones.
    """
    ratios = t.row_sum(t.log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    row = ratios.clamp(_MIN_LOG_SEQUENCE_RATIO, MAX_LOG_RATIO)
    power, decay = (torch.where(t.advantages >= 0, a, b).to(row.dtype) for a, b in zip(positive, negative, strict=True))
    return (decay + power * row - decay * row.exp()).exp()


def vespo_loss(t: PolicyTerms, positive: tuple[float, float], negative: tuple[float, float]) -> PolicyLoss:
    """VESPO (arXiv:2602.10693): REINFORCE weighted by `vespo_weights`."""
    return PolicyLoss(-vespo_weights(t, positive, negative) * t.advantages * t.log_probs)


def reinforce_loss(t: PolicyTerms) -> PolicyLoss:
    """Plain policy gradient: minus advantage times log-prob, no ratio."""
    return PolicyLoss(-t.advantages * t.log_probs)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Half the squared error of values `[R]`; with `clip`, the larger of it and that of values kept within `clip`
    of the old ones (the value clipping of PPO's reference implementation).

    Returns:
        loss per token `[R]`, and where clipping took the gradient away, `[R]` bool.
    """
    free = (values - returns).square()
    if clip is None:
        return 0.5 * free, torch.zeros_like(free, dtype=torch.bool)
    clipped = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return 0.5 * torch.maximum(free, clipped), clipped > free
