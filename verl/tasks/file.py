"""Checks before a model is loaded: settings of tasks, and the constraint that their responses are sampled under; data
against rewards and metrics; algorithms against ways of training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from verl._host.user_functions import load_function
from verl.algorithms import BaseAlgorithm
from verl.batch import Batch
from verl.errors import ConfigError, DataError, RewardError
from verl.report.metrics import Metric
from verl.rewards.source import RewardSource, leaves
from verl.rollout.constrained import ConstrainedEpisode
from verl.rollout.grammar import Grammar
from verl.rollout.guards import make_guard

#: What a task is called where there is only one.
MAIN = "main"
#: Rows that are looked at: a column that only later rows have is taken to be missing.
_ROWS = 256
#: As the constructors of `Grammar` are called.
_GRAMMARS = ("regex", "json_schema", "ebnf")
#: Options of `constraint_config` that are the episode's.
_OF_THE_EPISODE = ("max_resamples", "deadline")


def check_sources(algorithm: BaseAlgorithm, roles: Iterable[str]) -> None:
    """Raises ConfigError for a reward or cost that is missing, or that the algorithm does not have."""
    roles = set(roles)
    if extra := sorted(roles - algorithm.roles - algorithm.measures):
        raise ConfigError(f"algorithm '{algorithm.name}' has no {extra[0]}: leave {extra[0]}=... out")
    if algorithm.online and (lacking := {"reward", "cost"} & algorithm.roles - roles):
        role = max(lacking)
        raise ConfigError(f"algorithm '{algorithm.name}' needs a {role}: give the trainer {role}=...")


def check_heads(algorithms: Mapping[str, BaseAlgorithm]) -> None:
    """Raises ConfigError if two tasks of one actor want another head on it."""
    first, *others = algorithms
    for name in others:
        if (head := algorithms[name].head) != algorithms[first].head:
            raise ConfigError(
                f"task '{name}' trains a model with the head '{head}', task '{first}' one with "
                f"'{algorithms[first].head}': they cannot share an actor"
            )


def make_constraint(model: str | None, **config: Any) -> ConstrainedEpisode | None:
    """The episode of a constraint.

    Args:
        model: "regex", "json_schema" or "ebnf", a grammar whose text or schema is the option `grammar`; a registered
            guard, such as "fact_checker" (`GuardModel`); or FILE.py:NAME of `accept(text, row)`, plain or async, or of
            a class whose objects are a `Guard` or such a function. None: no constraint.
        **config: `max_resamples` and `deadline` of `ConstrainedEpisode`; the others are the grammar's or guard's.

    Raises:
        ConfigError: there is no such guard, or it does not take these options.
    """
    if model is None:
        return None
    limits = {name: config.pop(name) for name in _OF_THE_EPISODE if name in config}
    if model in _GRAMMARS:
        if config.keys() != {"grammar"}:
            raise ConfigError(f"constraint '{model}' takes grammar, max_resamples and deadline, not {sorted(config)}")
        return ConstrainedEpisode(grammar=getattr(Grammar, model)(config["grammar"]), **limits)
    if ":" not in model:
        check = make_guard(model, **config)
    elif inspect.isclass(check := load_function(model)):
        try:
            check = check(**config)
        except TypeError as error:
            raise ConfigError(f"{model}: {error}") from error
    elif config:
        raise ConfigError(f"{model} is a function, which takes no options: not {sorted(config)}")
    return ConstrainedEpisode(**({"guard": check} if hasattr(check, "every") else {"accept": check}), **limits)


def check_reads(data: Mapping[str, Batch], sources: Iterable[RewardSource], metrics: Iterable[Metric] = ()) -> None:
    """Raises DataError if the rows of one of some data, by their names, lack what a reward or a metric reads, or have
    a name in a column that none knows."""
    asked: list[Any] = [part for source in sources for part in {id(p): p for p in (source, *leaves(source))}.values()]
    asked += [metric.by_row for metric in metrics if metric.by_row is not None]
    checks: list[Callable[..., None]] = [leaf.check_data for leaf in asked if hasattr(leaf, "check_data")]
    for name, batch in data.items():
        for check in (part.check_values for part in asked if hasattr(part, "check_values")):
            check(name, batch)
        rows = list(islice(batch.rows(), _ROWS))
        for check in checks if rows else ():
            try:
                check(rows)
            except RewardError as error:
                raise DataError(f"{name}: {error}") from error


def check_permuted(algorithm: BaseAlgorithm) -> None:
    """Raises ConfigError where shuffled rewards would be no control."""
    if "reward" not in algorithm.roles:
        raise ConfigError(f"algorithm '{algorithm.name}' has no rewards to permute: use a zero learning rate")
    if (option := algorithm.own_rewards) is not None:
        raise ConfigError(f"permuted rewards must teach nothing, but {option} rewards by itself: leave it out")


def check_corrected(algorithm: BaseAlgorithm) -> None:
    """Raises ConfigError for an algorithm that takes its samples to be of the present policy."""
    if getattr(algorithm, "rollout_is", None) is None and getattr(algorithm, "rollout_rs", None) is None:
        raise ConfigError(
            f"algorithm '{algorithm.name}' does not correct for samples of an older policy: asynchronous "
            "training needs rollout_is (or rollout_rs) of an online algorithm"
        )


def check_asynchronous(algorithm: BaseAlgorithm, engine: object, episode: object, tensor_parallel: int = 1) -> None:
    """Raises ConfigError for what asynchronous training cannot do."""
    check_corrected(algorithm)
    if episode is not None or not isinstance(engine, str):
        raise ConfigError(
            "asynchronous training takes an engine by name or FILE.py:CLASS, and plays no episodes, agents or "
            "environments: leave max_staleness out, or rollout.episode and rollout.environment"
        )
    if tensor_parallel > 1:
        raise ConfigError(
            "a standalone rollout worker has a whole model: leave rollout.tensor_model_parallel_size out, train "
            "synchronously, or generate with vllm"
        )
