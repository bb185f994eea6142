"""Algorithms by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from typing import Any, TypeVar

from verl.algorithms.base import BaseAlgorithm
from verl.checked import checked
from verl.errors import ConfigError, nearest, shown
from verl.names import give_name
from verl.record import Name
from verl.user_functions import load_function

#: What a trainer or a run uses when nobody said.
DEFAULT_ALGORITHM = "grpo"

#: Modules of this package and the class of each that has the module's name.
_MODULES = {
    "cispo": "CISPO", "constrained_decoding": "ConstrainedDecoding", "dapo": "DAPO", "distillation": "Distillation",
    "dpo": "DPO", "dr_grpo": "DrGRPO", "gmpo": "GMPO", "gpg": "GPG", "grpo": "GRPO", "grpo_passk": "GRPOPassK",
    "gspo": "GSPO", "kto": "KTO", "opo": "OPO", "orpo": "ORPO", "ppo": "PPO", "remax": "ReMax",
    "reward_conditioned": "RewardConditioned", "reward_model": "RewardModel", "rloo": "RLOO", "safe_rlhf": "SafeRLHF",
    "sapo": "SAPO", "sft": "SFT", "simpo": "SimPO", "vespo": "VESPO",
}  # fmt: skip
#: Classes by name; those of this package as where they are, until one is asked for.
_ALGORITHMS: dict[str, type[BaseAlgorithm] | str] = {
    **{module: f"verl.algorithms.{module}.{name}" for module, name in _MODULES.items()},
    "ipo": "verl.algorithms.dpo.IPO",
    "reinforce_plus_plus": "verl.algorithms.reinforce_pp.ReinforcePlusPlus",
    "reinforce_plus_plus_baseline": "verl.algorithms.reinforce_pp.ReinforcePlusPlusBaseline",
}

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
    `DEFAULT_ALGORITHM`.

    Raises:
        ConfigError: an unknown name or option (the nearest is named), an option's value is of the wrong type,
            or options are given beside an instance.
    """
    algorithm = DEFAULT_ALGORITHM if algorithm is None else algorithm
    if isinstance(algorithm, BaseAlgorithm):
        if options:
            raise ConfigError(
                f"options {sorted(options)} were given beside a finished {type(algorithm).__name__}: set them in it"
            )
        return algorithm
    kind: type[BaseAlgorithm] = _by_name(algorithm) if isinstance(algorithm, str) else algorithm
    check_class(kind)
    known = {field.name for field in fields(kind) if field.init}
    for option in options:
        if option not in known:
            raise ConfigError(
                f"algorithm '{kind.name or kind.__name__}' has no option '{option}': {nearest(option, known)}"
            )
    return kind(**options)


def _by_name(name: str) -> Any:
    """The object of a registered name, or of "FILE.py:NAME"; not checked yet."""
    if ".py:" in name:
        return load_function(name)
    if name not in _ALGORITHMS:
        raise ConfigError(
            f"no algorithm is called '{name}': {nearest(name, _ALGORITHMS)} (one of your own: FILE.py:CLASS)"
        )
    known = _ALGORITHMS[name]
    if isinstance(known, str):
        module, _, qualname = known.rpartition(".")
        return getattr(import_module(module), qualname)
    return known
