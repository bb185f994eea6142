"""Dr. GRPO: Liu et al., "Understanding R1-Zero-Like Training" (arXiv:2503.20783).

GRPO without its two biases: no division by the group's standard deviation, and sums over tokens divided by a
constant instead of by the response's length. Set `loss_scale_factor` to the most new tokens.
"""

from __future__ import annotations

from verl.algorithms.aggregation import AggregationMode
from verl.algorithms.grpo import GRPO
from verl.algorithms.registry import register_algorithm


@register_algorithm("dr_grpo")
class DrGRPO(GRPO):
    """GRPO with other defaults."""

    norm_adv_by_std: bool = False
    loss_agg_mode: AggregationMode = "seq-mean-token-sum-norm"
