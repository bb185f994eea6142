"""Algorithms: what is optimised, each in one small file behind `BaseAlgorithm`; see `docs/algorithms.md`.

Reading order: `base`, `loss_terms`, `grpo`, `policy`, `responses`, `episodes`, `advantages`, `losses`, `aggregation`,
`kl`, `correction`, `ppo`, `registry`, `default`, `dapo`, `dr_grpo`, `gspo`, `cispo`, `gmpo`, `sapo`, `vespo`, `gpg`,
`rloo`, `reinforce_pp`, `remax`, `opo`, `grpo_passk`, `distillation`, `constrained_decoding`, `reward_conditioned`,
`safe_rlhf`, `lagrangian`, `sft`, `pairs`, `dpo`, `simpo`, `orpo`, `kto`, `reward_model`.
"""

from verl.algorithms.base import BaseAlgorithm, Loss, LossInput, RoleObjective
from verl.algorithms.default import default_algorithm, value_algorithm
from verl.algorithms.policy import Experience, PolicyGradient
from verl.algorithms.registry import algorithm_names, make_algorithm, register_algorithm

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
    "value_algorithm",
]
