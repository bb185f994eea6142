"""Algorithms: what is optimised, each a small class behind `BaseAlgorithm`; see `docs/algorithms.md`.

Reading order: `base`, `loss_terms`, `baselines`, `policy`, `responses`, `episodes`, `advantages`, `losses`, `kl`,
`correction`, `ppo`, `registry`, `ratios`, `likelihood`, `safe_rlhf`, `pairs`, `kto`.
"""

from verl.algorithms.base import BaseAlgorithm, Loss, LossInput, RoleObjective
from verl.algorithms.policy import Experience, PolicyGradient
from verl.algorithms.registry import algorithm_names, default_algorithm, make_algorithm, register_algorithm

__all__ = [
    "BaseAlgorithm",
    "Experience",
    "Loss",
    "LossInput",
    "PolicyGradient",
    "RoleObjective",
    "algorithm_names",
    "default_algorithm",
    "make_algorithm",
    "register_algorithm",
]
