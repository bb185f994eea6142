"""Checks before a model is loaded: data against rewards and metrics, algorithms against ways of training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from verl.algorithms import BaseAlgorithm
from verl.batch import Batch
from verl.errors import ConfigError, DataError, RewardError
from verl.report.metrics import Metric
from verl.rewards.source import RewardSource, leaves

#: Rows that are looked at: a column that only later rows have is taken to be missing.
_ROWS = 256


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
