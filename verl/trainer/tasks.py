"""The tasks of a trainer: made of its arguments, of a file, or of settings, and checked before a model is loaded; the
critics that they have; how much of each is sampled and learned; and their records as one."""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from verl._base.keywords import takes
from verl._base.names import check_known
from verl._host.user_functions import load_function
from verl.algorithms import BaseAlgorithm, make_algorithm
from verl.batch import Batch
from verl.config import TaskConfig, load_tasks
from verl.data.task_loader import TaskLoader, by_task, rescaled
from verl.dataflow.scores import Count, Mean, Seconds, one_row_per_episode, written_tokens
from verl.errors import ConfigError
from verl.report.metrics import add_metrics
from verl.roles.critic import Critic, as_critic, critic_like
from verl.roles.reward import Reward
from verl.rollout.base import as_sampling
from verl.rollout.constrained import ConstrainedEpisode
from verl.rollout.grammar import Grammar
from verl.rollout.guards import make_guard
from verl.trainer.options import KEYWORDS
from verl.trainer.task import Task

logger = logging.getLogger(__name__)

#: As the constructors of `Grammar` are called.
_GRAMMARS = ("regex", "json_schema", "ebnf")
#: Options of `constraint_config` that are the episode's.
_OF_THE_EPISODE = ("max_resamples", "deadline")


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


def task_of(config: TaskConfig, *, load: bool = True) -> Task:
    """A task from its settings.

    Args:
        load: of reward models, see `Reward`.

    Raises:
        ConfigError: the algorithm, the reward or one of their options is wrong; names the task.
    """
    try:
        as_sampling(config.sampling)
        reward = None if config.reward_model is None else Reward(config.reward_model, load=load, **config.reward_config)
        return Task(
            config.name,
            make_algorithm(config.type, **config.options),
            reward=reward,
            n=config.n,
            share=config.share,
            loss_weight=config.loss_weight,
            sampling=config.sampling or None,
            episode=make_constraint(config.constraint_model, **config.constraint_config),
        )
    except ConfigError as error:
        raise ConfigError(f"task '{config.name}': {error}") from error


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


def check_heads(algorithms: Mapping[str, BaseAlgorithm]) -> None:
    """Raises ConfigError if two tasks of one actor want another head on it."""
    first, *others = algorithms
    for name in others:
        if (head := algorithms[name].head) != algorithms[first].head:
            raise ConfigError(
                f"task '{name}' trains a model with the head '{head}', task '{first}' one with "
                f"'{algorithms[first].head}': they cannot share an actor"
            )


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
        ConfigError: tasks are given twice, or together with an argument of tasks; an option that no algorithm has;
            there is no task, or two have one name or different heads.
    """
    if config_path is not None:
        if tasks is not None:
            raise ConfigError("give the trainer its tasks once: tasks=... or config_path=...")
        tasks = [task_of(config) for config in load_tasks(config_path)]
    if tasks is None:
        of_task["episode"] = getattr(actor, "rewarding_episode", None)
        tasks = [Task(algorithm=algorithm_beside(KEYWORDS, algorithm, keywords), **of_task)]
    elif keywords or algorithm or any(value is not None and value != () for value in of_task.values()):
        others = "".join(f"; '{option}': {phrase}" for option in keywords if (phrase := takes(option, "Trainer")))
        raise ConfigError(
            "tasks have their own reward, cost, episode, algorithm, n, sampling and nodes: give the trainer "
            f"none{others}"
        )
    if not tasks:
        raise ConfigError("a trainer trains at least one task, and these are none")
    names = [task.name for task in tasks]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two tasks have the name '{twice}': give each its own")
    check_heads({task.name: task.algorithm for task in tasks})
    if not sum(task.share for task in tasks):
        raise ConfigError(f"the shares of the tasks {', '.join(names)} are all 0: nothing would be trained")
    return [*tasks]


class Mixture:
    """The shares of tasks, which sum to 1. In a step of all tasks, none with a `loss_weight`, they are the weights
    of the losses, too.

    Attributes:
        shares: of the prompts; taken from the `TaskLoader`, if training reads one.
        scheduler: changes them, if there is one.
        began: when the samples of a task were begun for the first time, or last trained.
    """

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self.tasks = tasks
        total = sum(task.share for task in tasks.values())
        self.shares = self._base = {name: task.share / total for name, task in tasks.items()}
        self.scheduler: Any = None
        self._loader: TaskLoader | None = None
        self.began: dict[str, float] = {}

    def adopt(self, loader: Any) -> None:
        """Take the shares of a `TaskLoader` that is to be trained on, and change them from now on.

        Raises:
            ConfigError: it has prompts of other tasks.
        """
        if hasattr(loader, "set_shares") and loader is not self._loader:
            check_known("the loader has prompts of task", loader.sources, self.tasks)
            self._base = {name: loader.shares.get(name, 0.0) for name in self.tasks}
            self._loader = loader
            self.share_out()

    def split(self, prompts: Any) -> dict[str, Any]:
        """Prompts by task. A single task, which has no prefix in metrics, gets all."""
        alone = {name: prompts for name, task in self.tasks.items() if not task.updater.name}
        return alone or by_task(prompts, [*self.tasks])

    def update(self, step: int, samples: Mapping[str, Batch], record: dict[str, Any]) -> None:
        """Add throughput and shares of tasks with a name to the record of a step, and let the scheduler read it."""
        now = time.perf_counter()
        for name, updater in ((name, task.updater) for name, task in self.tasks.items() if task.updater.name):
            of_task = {"share": self.shares[name]}
            if name in samples:
                began, self.began[name] = self.began[name], now
                rejected = record.get(updater.named("rollout/rejection_rate"), 0.0)
                of_task |= {"samples": len(samples[name]), "rejection_rate": rejected}
                # Over the time since it took part in a step before; tokens are those that the policy wrote.
                ended = one_row_per_episode(samples[name])
                counts = {"samples": len(ended), "updates": int(record["updated"])}
                counts["rewards"] = len(ended) - ended["reward"].count(None) if "reward" in ended else 0
                counts["tokens"] = written_tokens(samples[name])
                of_task |= {f"{what}_per_s": count / max(now - began, 1e-9) for what, count in counts.items()}
            add_metrics(record, updater.metrics(of_task), ())
        if self.scheduler is not None:
            metrics: dict[str, dict[str, float]] = {}  # of each task that has any
            for name, task in self.tasks.items():
                begin = task.updater.named("")
                logged = {key.removeprefix(begin): value for key, value in record.items() if key.startswith(begin)}
                if numbers := {key: float(value) for key, value in logged.items() if isinstance(value, int | float)}:
                    metrics[name] = numbers
            self.scheduler.update(step, metrics)
            self.share_out()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scheduler is None else self.scheduler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.scheduler is not None and state:
            self.scheduler.load_state_dict(state)
            self.share_out()

    def share_out(self) -> None:
        """Set the shares. Those of a scheduler's tasks together stay as they were, and none is below its floor."""
        self.shares = self._base
        if self.scheduler is not None:
            weights = self.scheduler.weights
            self.shares = rescaled(self._base, weights)
            floor, count = getattr(self.scheduler, "min_weight", 0.0), len(weights)
            left = sum(self.shares[name] for name in weights)
            if left < floor * count * (1 - 1e-9):
                raise ConfigError(
                    f"the scheduler's {count} tasks have {left:.3g} of the shares together, less than "
                    f"min_weight={floor:g} for each: lower it, or name the other tasks, too"
                )
            free = 1 - floor * count
            if free > 1e-9:
                above = (left - floor * count) / free
                self.shares |= {name: floor + above * max(weight - floor, 0.0) for name, weight in weights.items()}
        if self._loader is not None:
            self._loader.set_shares({name: self.shares[name] for name in self._loader.sources})


def joined(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One record of all tasks, and in it the metrics of each under its name.

    `reward` and other means are over all samples, or tokens, that have a value: with rewards on
    several scales, look at the tasks' own.

    Args:
        records: by the prefix of the task's metrics; empty for a task alone.
    """
    record: dict[str, Any] = {}
    for begin, of_task in records.items():
        for key, value in of_task.items():  # plain numbers, which anyone can load again
            record[f"{begin}{key}"] = value * 1 if isinstance(value, Mean | Count | Seconds) else value
    for key in dict.fromkeys(key for of_task in records.values() for key in of_task):
        values = [of_task[key] for of_task in records.values() if key in of_task]
        if isinstance(values[0], Count | Seconds):
            record.setdefault(key, sum(values))
        elif isinstance(values[0], Mean):
            present = [mean for mean in values if mean.count and not math.isnan(mean)]
            if present:
                count = sum(mean.count for mean in present)
                record.setdefault(key, sum(mean.count * float(mean) for mean in present) / count)
            elif key == "reward":
                record.setdefault(key, math.nan)
    if "rollout/tokens" in record:
        rate = record["rollout/tokens"] / max(record["time/rollout"], 1e-9)
        record.setdefault("rollout/tokens_per_s", rate)
    return record
