"""Entries of TRL's log that are measured in the forward pass of an update.

There is one function for each kind of trainer. It returns additive metrics of a micro-batch, which `whole` turns into
entries once they are summed over a mini-batch. Their names begin with `mean/` (shares of a mean), `sum/` and `count/`
(of a mean whose count one micro-batch does not know), `least/` (negated) and `most/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from verl.algorithms import BaseAlgorithm, LossInput, PolicyGradient
from verl.algorithms.base import FurtherMetrics
from verl.algorithms.pairs import sequence_log_probs, sequence_tokens, split_pairs

Parts: TypeAlias = dict[str, Tensor | float]
_PARTS = ("mean", "sum", "count", "least", "most")


def whole(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of an update, the entries among them whole."""
    entries = {}
    for name, value in metrics.items():
        part, _, entry = name.partition("/")
        if part == "mean":
            entries[entry] = value
        elif part == "sum" and (count := metrics[f"count/{entry}"]):
            entries[entry] = value / count
        elif part in ("least", "most"):
            entries[entry.removesuffix("/max")] = value if part == "most" else -value
    if {"rewards/chosen", "rewards/rejected"} <= entries.keys():
        entries["rewards/margins"] = entries["rewards/chosen"] - entries["rewards/rejected"]
    return {name: value for name, value in metrics.items() if name.partition("/")[0] not in _PARTS} | entries


def entries_of(algorithm: BaseAlgorithm, loss_type: Any) -> FurtherMetrics:
    """What measures the entries of an algorithm; of an online one by TRL's `loss_type`."""
    if algorithm.online:
        return _BY_LOSS.get(loss_type, of_clipped)
    if algorithm.coupled:
        return of_scores if algorithm.head == "score" else of_pairs
    return of_sides if "label" in algorithm.loss_columns else of_tokens


def of_tokens(algorithm: BaseAlgorithm, x: LossInput) -> Parts:
    """Of demonstrations."""
    return _mean("entropy", x.entropy, x.mask) | _mean("mean_token_accuracy", x.is_top, x.mask)


def of_sides(algorithm: Any, x: LossInput) -> Parts:
    """Of responses with a label."""
    rows, good = sequence_log_probs(x, algorithm.needed_log_probs(x)), x.columns["label"] > 0.5
    parts, rewards = _mean("entropy", x.entropy, x.mask), _rewards(algorithm, x)
    for side, where in (("chosen", good), ("rejected", ~good)):
        parts |= _mean(f"logps/{side}", rows, where) | _mean(f"rewards/{side}", rewards, where)
        parts |= _mean(f"logits/{side}", x.mean_logits, where[x.sequence] & x.mask)
    return parts


def of_pairs(algorithm: Any, x: LossInput) -> Parts:
    """Of pairs: the entries of both sides, and how often the chosen one wins."""
    chosen, rejected = split_pairs(x, _rewards(algorithm, x))
    parts = of_sides(algorithm, x)
    parts["mean/rewards/accuracies"] = (chosen > rejected).sum() / max(x.total_groups, 1)
    return parts | _mean("mean_token_accuracy", x.is_top, (x.columns["label"] > 0.5)[x.sequence] & x.mask)


def of_scores(algorithm: BaseAlgorithm, x: LossInput) -> Parts:
    """A reward model's."""
    assert x.scores is not None
    chosen, rejected = split_pairs(x, x.scores)
    pairs = max(x.total_groups, 1)
    return {
        "mean/accuracy": (chosen > rejected).sum() / pairs,
        "mean/margin": (chosen - rejected).sum() / pairs,
        "mean/mean_reward": x.scores.sum() / max(x.total_sequences, 1),
        "least/min_reward/max": -x.scores.min(),
        "most/max_reward/max": x.scores.max(),
    }


def of_policy(algorithm: Any, x: LossInput) -> Parts:
    """Of samples: their entropy, and the KL in the loss."""
    terms, parts = algorithm.terms(x, x.mask), _mean("entropy", x.entropy, x.mask)
    if "ref_log_probs" in x.columns:
        kl = algorithm.token_kl(terms.log_probs, x.columns["ref_log_probs"])
        parts |= _mean("kl", kl * algorithm.ratio(terms) if algorithm.kl_by_ratio else kl, x.mask)
    return parts


def of_clipped(algorithm: Any, x: LossInput) -> Parts:
    """And where the ratio is clipped: of tokens, or of rows where it is the row's. In rows that are not computed it is
    nowhere, since their advantage is 0."""
    terms, (low, high) = algorithm.terms(x, x.mask), algorithm.clip_bounds
    ratio, tokens = algorithm.ratio(terms), sequence_tokens(x)
    by_row = type(algorithm).ratio is not PolicyGradient.ratio
    weights = x.mask / (tokens[x.sequence] * x.total_sequences if by_row else max(x.total_tokens, 1))
    below, above = (ratio < 1 - low) & (terms.advantages < 0), (ratio > 1 + high) & (terms.advantages > 0)
    parts = of_policy(algorithm, x)
    for side, where in (("low", below), ("high", above), ("region", below | above)):
        parts[f"mean/clip_ratio/{side}_mean"] = (where * weights).sum()
    least, most = (x.sum_by_sequence((where & x.mask).to(tokens.dtype)) / tokens for where in (below, above))
    all_computed = x.computed_sequences == x.total_sequences
    parts["least/clip_ratio/low_min/max"] = -least.min() if all_computed else 0.0
    parts["most/clip_ratio/high_max/max"] = most.max()
    return parts


def of_clipped_weights(algorithm: Any, x: LossInput) -> Parts:
    """The same of a ratio that is a clipped weight."""
    terms = algorithm.terms(x, x.mask)
    clipped = (algorithm.ratio(terms) > 1 + algorithm.clip_bounds[1]) & (terms.advantages > 0) & x.mask
    return of_policy(algorithm, x) | {"mean/cispo_clip_ratio": clipped.sum() / max(x.total_tokens, 1)}


def of_soft_weights(algorithm: Any, x: LossInput) -> Parts:
    """The weights of rows by a function of their ratio."""
    weights = algorithm.row_weights(algorithm.terms(x, x.mask))
    rows = x.sum_by_sequence(torch.where(x.mask, weights, 0.0)) / sequence_tokens(x)
    return of_policy(algorithm, x) | _mean("vespo/phi_seq_mean", rows, torch.ones_like(rows, dtype=torch.bool))


#: Where the ratio is not clipped on both sides.
_BY_LOSS: dict[str, FurtherMetrics] = {"cispo": of_clipped_weights, "sapo": of_policy, "vespo": of_soft_weights}


def _mean(entry: str, values: Tensor | None, where: Tensor) -> Parts:
    """The mean of values `[N]` where a mask `[N]` is true."""
    assert values is not None
    return {f"sum/{entry}": torch.where(where, values, 0.0).sum(), f"count/{entry}": where.sum()}


def _rewards(algorithm: Any, x: LossInput) -> Tensor:
    """`[S]`: the implicit reward of each row."""
    log_ratio = algorithm.needed_log_probs(x) - x.columns["ref_log_probs"]
    rewards: Tensor = algorithm.beta * sequence_log_probs(x, log_ratio)
    return rewards
