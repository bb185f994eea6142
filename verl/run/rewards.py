"""The rewards that the settings name, made without their models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.batch import Batch
from verl.config import Config, CostConfig, RewardPart
from verl.errors import ConfigError
from verl.rewards.forms import recognise
from verl.rewards.make import make_reward, misspelt
from verl.rewards.registry import REWARDS
from verl.rewards.source import RewardResult, RewardSource
from verl.tasks.task import MAIN
from verl.user_functions import load_function

#: Options of a task's reward that are of how it is called.
_OF_THE_CALLS = ("workers", "max_workers")


class UnreadModel:
    """Stands for a reward model, whose weights are not read."""

    name = "model"
    whole_batch = True
    columns = recognise(lambda responses, prompts: []).columns

    async def score(self, batch: Batch) -> RewardResult:
        raise NotImplementedError("a stand-in computes nothing")


def source_of(part: RewardPart) -> dict[str, Any]:
    """What `make_reward` takes for a reward: its one origin as `source` with its own options, or several by name."""
    if isinstance(part, CostConfig) and part.components:
        return {name: {**source_of(each), "weight": each.weight} for name, each in part.components.items()}
    (origin,) = part.origins()
    if origin == "name":
        return {"source": part.name, **({} if part.answer == "whole" else {"answer": part.answer})}
    if origin == "model":
        return {"source": part.model, "dtype": part.dtype}
    judge = {"template": part.template, "scale": part.scale}
    return {"source": getattr(part, origin), **{name: value for name, value in judge.items() if value is not None}}


def rewarding_episode(config: Config) -> Any:
    """The episode of the settings, if it says its rewards itself, as environments and agents do; else None."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.environment is not None:
        from verl.rollout.environments import as_environments

        return as_environments(rollout.environment)
    episode = None if rollout.episode is None else load_function(rollout.episode)
    return episode if getattr(episode, "gives_reward", False) else None


def sources_of(config: Config) -> dict[str, dict[str, RewardSource]]:
    """The rewards of each task by role, with a stand-in for each model in them. Imports the user's functions.

    Raises:
        ConfigError, RewardError: one is none, or has no such option.
    """
    if not config.tasks:
        sections = {"reward": config.reward, "cost": config.cost}
        sources = {role: _made(source_of(section), {}) for role, section in sections.items() if section.is_given}
        if (episode := rewarding_episode(config)) is not None:
            from verl.rewards.environments import with_episodes

            sources["reward"] = with_episodes(sources.get("reward"), episode)
        return {MAIN: sources}
    by_task: dict[str, dict[str, RewardSource]] = {}
    for task in config.tasks:
        options = {name: value for name, value in task.reward_config.items() if name not in _OF_THE_CALLS}
        try:
            by_task[task.name] = {} if task.reward_model is None else {"reward": _made(task.reward_model, options)}
        except ConfigError as error:
            raise ConfigError(f"task '{task.name}': {error}") from error
    return by_task


def _made(source: Any, options: Mapping[str, Any]) -> RewardSource:
    unread = _unread(source)
    return unread if isinstance(unread, UnreadModel) else make_reward(unread, **options)


def _unread(source: Any) -> Any:
    """A source with the stand-in in the place of every model in it."""
    if isinstance(source, Mapping):
        if "source" not in source:
            return {name: _unread(part) for name, part in source.items()}
        inner = _unread(source["source"])
        return inner if isinstance(inner, UnreadModel) else {**source, "source": inner}
    if isinstance(source, list | tuple):
        return type(source)(_unread(part) for part in source)
    if not isinstance(source, str):
        return source
    is_other = source in REWARDS or ".py:" in source or "://" in source or misspelt(source)
    return source if is_other and source != "rm_hf" else UnreadModel()
