"""Off-policy correction: the engine that sampled and the trainer do not compute the same log-probs.

With r = pi_trainer(token) / pi_engine(token), gradients of samples from the engine are weighted by r, bounded from
above (truncated importance sampling, TIS), or set to 0 outside bounds (masked; IcePop), on tokens or on whole
rows; or tokens and rows that are too far off are left out of the loss (rejection). All are statistics of whole
rows, detached, computed once for the whole batch.

A token whose log-ratio is not finite (an engine that reported NaN or -inf) counts as out of bounds: its weight
is 0, it is left out of the measures, and `mismatch/nonfinite` counts it.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from verl.algorithms.kl import kl_estimate
from verl.algorithms.losses import bounded_ratio
from verl.algorithms.responses import Responses
from verl.errors import ConfigError

Level = Literal["token", "sequence"]
Rejection = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
]  # fmt: skip


class LogRatio:
    """log pi_trainer - log pi_engine of the tokens `[R]`, 0 where it is not usable, and which are usable."""

    def __init__(self, responses: Responses, trainer: Tensor, engine: Tensor) -> None:
        difference = trainer - engine
        self.responses = responses
        self.usable = responses.written & difference.isfinite()
        self.values = torch.where(self.usable, difference, 0.0)


def importance_weights(
    log_ratio: LogRatio, level: Level, threshold: float, lower: float | None = None, normalize: bool = False
) -> Tensor:
    """Weight of each token, `[R]`; 0 on tokens that are not usable.

    Args:
        level: "token": the token's ratio; "sequence": the product of the row's ratios, at each of its tokens.
        threshold: without `lower`, larger weights are cut to it.
        lower: with it, weights outside [lower, threshold] become 0 instead.
        normalize: divide by the mean weight of the tokens ("sequence": of the rows), so that it is 1.
    """
    responses = log_ratio.responses
    raw = log_ratio.values
    if level == "sequence":
        raw = responses.sum(raw)[responses.sequence]
    raw = torch.where(log_ratio.usable, bounded_ratio(raw), 0.0)
    if lower is None:
        weights = raw.clamp(max=threshold)
    else:
        weights = torch.where((raw >= lower) & (raw <= threshold), raw, 0.0)
    if not normalize:
        return weights
    # The weight of a row stands at all of its tokens and counts once in the mean, however many they are.
    share = log_ratio.usable.double()
    if level == "sequence":
        share = share / responses.sum(log_ratio.usable).clamp(min=1)[responses.sequence]
    mean = (weights * share).sum() / share.sum().clamp(min=1e-8)
    return weights / mean if mean > 1e-8 else weights


def accepted(log_ratio: LogRatio, rule: Rejection, upper: float, lower: float | None = None) -> Tensor:
    """`[R]` bool: tokens that stay in the loss.

    A rule is a level and a statistic of the log-ratio d: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d (see `kl`),
    at the token, or its sum, mean or maximum over the row; it stays within `rejection_bounds`.
    """
    low, high = rejection_bounds(rule, upper, lower)
    level, kind = rule.rsplit("_", 1)
    responses = log_ratio.responses
    d = log_ratio.values
    statistic = torch.where(log_ratio.usable, kl_estimate(-d, torch.zeros_like(d), kind), 0.0)
    if level == "seq_max":
        highest = statistic.new_zeros(responses.rows)
        statistic = highest.scatter_reduce(0, responses.sequence, statistic, "amax")[responses.sequence]
    elif level != "token":
        counts = responses.sum(log_ratio.usable).clamp(min=1) if level == "seq_mean" else 1.0
        statistic = (responses.sum(statistic) / counts)[responses.sequence]
    return log_ratio.usable & (statistic >= low) & (statistic <= high)


def rejection_bounds(rule: Rejection, upper: float, lower: float | None = None) -> tuple[float, float]:
    """Bounds of the rule's statistic: k1 stays within [log lower, log upper] (`lower` is 1 / upper if not given), k2
    and k3 at or below `upper`.

    Raises:
        ConfigError: a bound is not positive, or `lower` is given to k2 or k3, or above `upper`.
    """
    least = 1 / upper if lower is None and upper > 0 else lower
    if upper <= 0 or least is None or least <= 0 or (rule.endswith("k1") and least > upper):
        bounds = f"rollout_rs_lower={lower} and rollout_rs_threshold={upper}"
        raise ConfigError(f"rejection '{rule}' needs bounds 0 < lower <= upper, got {bounds}")
    if not rule.endswith("k1"):
        if lower is not None:
            raise ConfigError(f"rejection '{rule}' has an upper bound only: leave out rollout_rs_lower={lower}")
        return -math.inf, upper
    return math.log(least), math.log(upper)


def mismatch(log_ratio: LogRatio, weights: Tensor | None = None) -> dict[str, float]:
    """How far the engine is from the trainer, over usable tokens.

    kl: KL(engine || trainer), k1, in nats a token; k3: its estimate of low variance; log_ratio/max: the largest
    absolute log-ratio; ess: effective sample size of the weights as a fraction, (sum w)^2 / (n sum w^2);
    nonfinite: written tokens whose log-ratio is not finite. No usable token: kl 0, ess 1.
    """
    usable = log_ratio.usable
    d = log_ratio.values[usable]
    w = bounded_ratio(d) if weights is None else weights[usable]
    metrics = mismatch_shares(d, usable[usable], len(d))
    metrics["mismatch/ess"] = w.sum().square() / (len(w) * w.square().sum()).clamp(min=1e-300) if len(w) else 1.0
    metrics["mismatch/nonfinite"] = (log_ratio.responses.written & ~usable).sum()
    return {name: float(value) for name, value in metrics.items()}


def mismatch_shares(log_ratio: Tensor, active: Tensor, computed_tokens: int) -> dict[str, Tensor | float]:
    """`mismatch` without weights, as the additive shares of a micro-batch. Its means are over all tokens that count:
    how many are finite elsewhere is not known here, so one that is not adds 0.

    Args:
        log_ratio: `[R]`, the trainer's log-probs minus the engine's.
        active: `[R]` bool, the tokens that count.
        computed_tokens: how many count in the computed rows of the whole mini-batch.
    """
    usable = active & log_ratio.isfinite()
    d = torch.where(usable, log_ratio, 0.0)
    count = max(computed_tokens, 1)
    return {
        "mismatch/kl": -d.sum() / count,
        "mismatch/k3": kl_estimate(-d, torch.zeros_like(d), "k3").sum() / count,
        "mismatch/log_ratio/max": d.abs().max() if len(d) else 0.0,
        "mismatch/nonfinite": (active & ~usable).sum(),
    }
