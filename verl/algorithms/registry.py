"""Algorithms by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pkgutil import resolve_name
from typing import Any, TypeVar

from verl._base.checked import checked
from verl._base.names import check_known, give_name
from verl._base.record import Name
from verl._host.user_functions import load_function
from verl.algorithms.base import BaseAlgorithm
from verl.batch import Batch
from verl.errors import ConfigError, shown

#: Classes by name; those of this package as where they are, until one is asked for.
_ALGORITHMS: dict[str, type[BaseAlgorithm] | str] = {name: f"verl.algorithms.{path}" for name, path in {
    "cispo": "ratios.CISPO", "constrained_decoding": "likelihood.ConstrainedDecoding", "dapo": "baselines.DAPO",
    "distillation": "likelihood.Distillation", "dpo": "pairs.DPO", "dr_grpo": "baselines.DrGRPO",
    "gmpo": "ratios.GMPO", "gpg": "baselines.GPG", "grpo": "baselines.GRPO", "grpo_passk": "baselines.GRPOPassK",
    "gspo": "ratios.GSPO", "ipo": "pairs.IPO", "kto": "kto.KTO", "opo": "baselines.OPO", "orpo": "pairs.ORPO",
    "ppo": "ppo.PPO", "reinforce_plus_plus": "baselines.ReinforcePlusPlus",
    "reinforce_plus_plus_baseline": "baselines.ReinforcePlusPlusBaseline", "remax": "baselines.ReMax",
    "reward_conditioned": "likelihood.RewardConditioned", "reward_model": "pairs.RewardModel",
    "rloo": "baselines.RLOO", "safe_rlhf": "safe_rlhf.SafeRLHF", "sapo": "ratios.SAPO", "sft": "likelihood.SFT",
    "simpo": "pairs.SimPO", "vespo": "ratios.VESPO",
}.items()}  # fmt: skip

AlgorithmT = TypeVar("AlgorithmT", bound=type[BaseAlgorithm])


@checked
def register_algorithm(name: Name) -> Callable[[AlgorithmT], AlgorithmT]:
    """Class decorator: the algorithm can be chosen by this name. A class of the same name and module replaces
    its earlier definition (a notebook cell run twice).

    Raises:
        ConfigError: not a `BaseAlgorithm`, `compute_loss` is missing, or the name belongs to another class.
    """

    def register(cls: AlgorithmT) -> AlgorithmT:
        check_class(cls)
        give_name(_ALGORITHMS, "algorithm", name, cls)
        cls.name = name
        return cls

    return register


def check_class(cls: Any) -> None:
    """Raises ConfigError unless `cls` is an algorithm class that can be instantiated."""
    if not (inspect.isclass(cls) and issubclass(cls, BaseAlgorithm)):
        raise ConfigError(f"an algorithm is a subclass of verl.BaseAlgorithm, got {shown(cls)}")
    missing = sorted(cls.__abstractmethods__)
    if missing:
        methods = " and ".join(f"{name}()" for name in missing)
        raise ConfigError(f"algorithm {cls.__qualname__} must implement {methods}")


def algorithm_names() -> list[str]:
    """All registered names, sorted."""
    return sorted(_ALGORITHMS)


def make_algorithm(algorithm: str | BaseAlgorithm | type[BaseAlgorithm] | None, **options: Any) -> BaseAlgorithm:
    """An algorithm by name, "FILE.py:CLASS" or class with its options, or an instance as it is; None:
    GRPO, what a trainer or a run uses when nobody said.

    Raises:
        ConfigError: an unknown name or option (the nearest is named), an option of the wrong type, or options given
            together with an instance.
    """
    algorithm = "grpo" if algorithm is None else algorithm
    if isinstance(algorithm, BaseAlgorithm):
        if options:
            raise ConfigError(
                f"options {sorted(options)} were given beside a finished {type(algorithm).__name__}: set them in it"
            )
        return algorithm
    kind: Any = algorithm
    if isinstance(algorithm, str):
        if ".py:" in algorithm:
            kind = load_function(algorithm)
        else:
            check_known("no algorithm is called", [algorithm], _ALGORITHMS, hint=" (one of your own: FILE.py:CLASS)")
            kind = _ALGORITHMS[algorithm]
            kind = resolve_name(kind) if isinstance(kind, str) else kind
    check_class(kind)
    known = {field.name for field in fields(kind) if field.init}
    check_known(f"algorithm '{kind.name or kind.__name__}' has no option", options, known)
    return kind(**options)  # type: ignore[no-any-return]


def default_algorithm(batch: Batch | None = None) -> BaseAlgorithm:
    """What an update optimises when nobody said: PPO of a critic, or where the batch has values; else GRPO where every
    group has several samples, else REINFORCE++.

    Without KL: an algorithm made for each call has no adaptive coefficient, and needs no reference model.
    """
    if batch is None or "values" in batch:
        return make_algorithm("ppo", kl_in="none", kl_target=None)
    return make_algorithm("grpo" if all(len(rows) > 1 for rows in batch.group_indices()) else "reinforce_plus_plus")
