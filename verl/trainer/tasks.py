"""The tasks of a trainer: made of its arguments, of a file, or of settings; and the critics that they have."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from verl._base.keywords import takes
from verl.algorithms import BaseAlgorithm, make_algorithm
from verl.config import TaskConfig, load_tasks
from verl.errors import ConfigError
from verl.roles.critic import Critic, as_critic, critic_like
from verl.roles.reward import Reward
from verl.tasks.file import algorithm_of, check_heads, make_constraint
from verl.trainer.options import trainer_keywords
from verl.trainer.task import Task

logger = logging.getLogger(__name__)


def critics_of(tasks: Sequence[Task], critic: Any) -> dict[str, Critic | None]:
    """The critic of each task, or None where it is made from the actor: its own, or else `critic`. Several tasks with a
    critic that are given one have a copy of it each."""
    shared, used = as_critic(critic), False
    critics: dict[str, Critic | None] = {}
    for task in tasks:
        critics[task.name] = as_critic(task.critic)
        if task.critic is None and shared is not None and "critic" in task.algorithm.roles:
            start = (shared.files, lambda: shared.model, shared.tokenizer)
            critics[task.name] = critic_like(shared, *start) if used else shared
            used = True
    if shared is not None and not used:
        names = " and ".join(f"'{task.algorithm.name}'" for task in tasks)
        logger.warning("algorithm %s has no critic: what is given is not used", names)
    return critics


def task_of(config: TaskConfig) -> Task:
    """A task from its settings.

    Raises:
        ConfigError: the algorithm, the reward or one of their options is wrong; names the task.
    """
    algorithm = algorithm_of(config)
    try:
        return Task(
            config.name,
            algorithm,
            reward=None if config.reward_model is None else Reward(config.reward_model, **config.reward_config),
            n=config.n,
            share=config.share,
            loss_weight=config.loss_weight,
            sampling=config.sampling or None,
            episode=make_constraint(config.constraint_model, **config.constraint_config),
        )
    except ConfigError as error:
        raise ConfigError(f"task '{config.name}': {error}") from error


def algorithm_beside(keywords: Iterable[str], algorithm: Any, options: Mapping[str, Any]) -> BaseAlgorithm:
    """The algorithm with the options that are left of a trainer's keywords.

    Args:
        keywords: the trainer's own.

    Raises:
        ConfigError: the algorithm has no such option; it names the call that takes it, or the nearest of `keywords`.
    """
    try:
        return make_algorithm(algorithm, **options)
    except ConfigError as error:
        for option in (option for option in options if f"has no option '{option}'" in str(error)):
            close = [f"did you mean '{name}'?" for name in get_close_matches(option, [*keywords], 1, 0.75)]
            if phrase := takes(option, "Trainer") or "".join(close):
                raise ConfigError(f"there is no keyword '{option}': {phrase}") from None
        raise


def tasks_of(
    keywords: Mapping[str, Any],
    *,
    algorithm: str | BaseAlgorithm | None,
    tasks: Sequence[Task] | None,
    config_path: str | Path | None = None,
    actor: Any = None,
    **of_task: Any,
) -> list[Task]:
    """The tasks of a trainer: from `tasks`, from a file, or one that its arguments describe.

    Args:
        keywords: options of the algorithm.
        actor: its episode is the only task's, if it gives rewards.
        **of_task: arguments of `Task`, which several tasks have themselves.

    Raises:
        ConfigError: tasks are given twice, or together with an argument of tasks; an option that no algorithm has.
    """
    if config_path is not None:
        if tasks is not None:
            raise ConfigError("give the trainer its tasks once: tasks=... or config_path=...")
        tasks = [task_of(config) for config in load_tasks(config_path)]
    if tasks is None:
        of_task["episode"] = getattr(actor, "rewarding_episode", None)
        tasks = [Task(algorithm=algorithm_beside(trainer_keywords(), algorithm, keywords), **of_task)]
    elif keywords or algorithm or any(value is not None and value != () for value in of_task.values()):
        others = "".join(f"; '{option}': {phrase}" for option in keywords if (phrase := takes(option, "Trainer")))
        raise ConfigError(
            "tasks have their own reward, cost, episode, algorithm, n, sampling and nodes: give the trainer "
            f"none{others}"
        )
    check_tasks(tasks)
    return [*tasks]


def check_tasks(tasks: Sequence[Task]) -> None:
    """Raises ConfigError if there is no task, two have one name or different heads, or an only one is weighed against
    others."""
    if not tasks:
        raise ConfigError("a trainer trains at least one task, and these are none")
    names = [task.name for task in tasks]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two tasks have the name '{twice}': give each its own")
    check_heads({task.name: task.algorithm for task in tasks})
    if len(tasks) == 1 and (tasks[0].share, tasks[0].loss_weight) != (1.0, None):
        raise ConfigError(
            f"task '{names[0]}' is the only one, with nothing to weigh it against: leave share and loss_weight out"
        )
    if not sum(task.share for task in tasks):
        raise ConfigError(f"the shares of the tasks {', '.join(names)} are all 0: nothing would be trained")
