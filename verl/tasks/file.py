"""From the tasks of a YAML file to what a trainer takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.algorithms import BaseAlgorithm, make_algorithm
from verl.config import TaskConfig, load_tasks
from verl.errors import ConfigError
from verl.rollout.base import as_sampling
from verl.tasks.task import Task, check_sources

if TYPE_CHECKING:
    from verl.rollout.episode import Episode


def read_tasks(path: str | Path) -> list[Task]:
    """The tasks of a file that holds nothing but `tasks`.

    Raises:
        ConfigError: a setting is wrong, or contradicts another; see `load_tasks` and `Task`.
    """
    return make_tasks(load_tasks(path))


def make_tasks(configs: Sequence[TaskConfig], **called: Any) -> list[Task]:
    """Tasks from their settings; `called` are options of all their rewards.

    Raises:
        ConfigError: an algorithm, a reward or one of their options is none; names the task.
    """
    return [_task(config, called) for config in configs]


def algorithm_of(config: TaskConfig) -> BaseAlgorithm:
    """The algorithm of a task's settings, found to agree with them.

    Raises:
        ConfigError: as of `make_tasks`, but for options of the reward.
    """
    try:
        algorithm = make_algorithm(config.type, **config.options)
        check_sources(algorithm, () if config.reward_model is None else ("reward",))
        algorithm.check_samples(samples_of(config, algorithm))
    except ConfigError as error:
        raise ConfigError(f"task '{config.name}': {error}") from error
    return algorithm


def check_sampling(config: TaskConfig) -> None:
    """Raises ConfigError where a task's responses cannot be sampled as its settings say."""
    try:
        as_sampling(config.sampling)
        _episode(config)
    except ConfigError as error:
        raise ConfigError(f"task '{config.name}': {error}") from error


def samples_of(config: TaskConfig, algorithm: BaseAlgorithm) -> int:
    """Samples a prompt."""
    return algorithm.samples_per_prompt if config.n is None else config.n


def _task(config: TaskConfig, called: dict[str, Any]) -> Task:
    from verl.roles.reward import Reward  # it imports transformers, without which settings are checked

    algorithm = algorithm_of(config)
    try:
        sources = {}
        if config.reward_model is not None:
            sources["reward"] = Reward(config.reward_model, **{**called, **config.reward_config})
        return Task(
            config.name,
            algorithm,
            sources,
            n=samples_of(config, algorithm),
            share=config.share,
            loss_weight=config.loss_weight,
            sampling=config.sampling or None,
            episode=_episode(config),
        )
    except ConfigError as error:
        raise ConfigError(f"task '{config.name}': {error}") from error


def _episode(config: TaskConfig) -> Episode | None:
    if config.constraint_model is None:
        return None
    from verl.tasks.constraints import make_constraint

    return make_constraint(config.constraint_model, **config.constraint_config)
