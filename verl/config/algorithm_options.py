"""The options of all algorithms that come with the package, as keywords of calls that make one: for type checkers, and
for what reads settings without torch.

Each algorithm checks its own at run time. An algorithm of your own, with options of its own, is made first:
`Trainer(..., algorithm=Mine(option=...))`.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import TypedDict


class AlgorithmKeywords(TypedDict, total=False):
    """See docs/algorithms.md for what each means, and which algorithms have it."""

    baseline: str
    beta: float
    center_rewards_coefficient: float
    clip_ratio: float
    clip_ratio_c: float | None
    clip_ratio_high: float | None
    clip_ratio_low: float | None
    cliprange_value: float | None
    cost_limit: float
    desirable_weight: float
    discopop_tau: float
    entropy_coeff: float
    f_norm: float
    filter_groups: bool
    filter_metric: str
    gamma: float
    k_neg: float
    k_pos: float
    kl_by_ratio: bool
    kl_coef: float
    kl_estimator: str | None
    kl_horizon: int
    kl_rows: int | None
    kl_in: str
    kl_target: float | None
    label_smoothing: float
    lam: float
    lambda_delay: int
    lambda_init: float
    lambda_kp: float
    lambda_lr: float
    lambda_max: float
    lambda_min: float
    lambda_neg: float
    lambda_pos: float
    lambda_window: int
    learn: bool
    loss_agg_mode: str
    loss_scale_factor: float | None
    loss_type: str
    max_log_ratio: float | None
    norm_adv_by_std: bool | str
    overlong_buffer: int
    overlong_length: int | None
    overlong_penalty: float
    prefixes: Sequence[str]
    ratio_of: str
    rollout_is: str | None
    rollout_is_lower: float | None
    rollout_is_normalize: bool
    rollout_is_threshold: float
    rollout_rs: str | None
    rollout_rs_lower: float | None
    rollout_rs_threshold: float
    std_epsilon: float | None
    temperature_neg: float
    temperature_pos: float
    undesirable_weight: float
