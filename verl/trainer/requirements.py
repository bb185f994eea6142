"""What a way of training asks of an algorithm."""

from __future__ import annotations

from verl.algorithms import BaseAlgorithm
from verl.errors import ConfigError


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
