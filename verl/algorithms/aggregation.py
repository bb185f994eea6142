"""How per-token losses become one number: weights over the whole mini-batch, `loss = (weights * per_token).sum()`.

Every mode divides by counts of the whole mini-batch on all ranks, so neither micro-batches nor ranks can change a
gradient. Modes and names are verl's; rows without a counted token are not counted as sequences.

Deviation: "seq-mean-token-sum-norm" without `loss_scale_factor` divides by the longest response of the
mini-batch, since there is no padded width here. Set the factor to the most new tokens for a constant norm.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from verl._base.autograd import sum_rows
from verl.errors import ConfigError, nearest

AggregationMode: TypeAlias = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


def aggregation_weights(
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    mode: str = "token-mean",
    scale_factor: float | None = None,
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

    Raises:
        ConfigError: an unknown mode.
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
    if mode == "seq-mean-token-sum-norm":
        longest = torch.bincount(sequence, minlength=1).max().clamp(min=1)
        return counted / (sequences * (scale_factor or longest))
    modes = AggregationMode.__args__  # type: ignore[attr-defined]
    raise ConfigError(f"unknown loss_agg_mode '{mode}': {nearest(mode, modes)}")
