"""What environments and agents say of their episodes, as rewards beside those of the trainer, or in their place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl._host.user_calls import is_async
from verl.batch import Batch
from verl.errors import ConfigError, RewardError
from verl.rewards.calls import ThreadCaller
from verl.rewards.composite import CompositeReward
from verl.rewards.functions import FunctionReward
from verl.rewards.make import make_reward
from verl.rewards.processes import ProcessCaller
from verl.rewards.scores import read_score
from verl.rewards.source import RewardResult, leaves

#: What the parameter of a reward function is called that gets the environments of its samples.
PARAMETER = "environments"


class EnvironmentReward:
    """`get_reward()` of the environments of one class, called when their episodes ended.

    Args:
        name: of the class.
        chosen_by: values of the column `environment` that stand for it; None: there is no other class.
        missing: why a sample abstains whose episode says nothing; None: it is another class's.
    """

    whole_batch = False
    columns = ("episode_reward?", "environment?")

    def __init__(self, name: str, chosen_by: Sequence[str] | None = None, missing: str | None = None) -> None:
        self.name, self._chosen_by, self._missing = name, chosen_by, missing

    async def score(self, batch: Batch) -> RewardResult:
        rewards = batch["episode_reward"] if "episode_reward" in batch else [None] * len(batch)
        if self._chosen_by is not None:
            rewards = [r if e in self._chosen_by else None for r, e in zip(rewards, batch["environment"], strict=True)]
        scores = [None if reward is None else read_score(reward) for reward in rewards]
        return RewardResult(
            [None if score is None else score.value for score in scores],
            reasons=[
                self._missing if score is None else score.reason and f"{self.name}.get_reward() {score.reason}"
                for score in scores
            ],
        )


class EnvironmentSum(CompositeReward):
    """The rewards of a trainer and of its environments, TRL's way: the sum of those that there are for a sample.

    Functions with a parameter `environments` get those of their samples, as they are behind the episodes.

    Args:
        reward: of the trainer: anything that `make_reward` takes; None: the environments' alone.
        episode: their `EnvironmentEpisode`.

    Raises:
        ConfigError: neither has a reward; or a function that is called in workers reads environments.
    """

    def __init__(self, reward: Any, episode: Any) -> None:
        parts: list[Any] = []
        if reward is not None:
            source = make_reward(reward)
            parts = [source]
            if isinstance(source, CompositeReward):
                parts = [(part, source.weights[name]) for name, part in source.parts.items()]
        parts += [EnvironmentReward(name, None if None in by else by) for name, by in episode.rewards.items()]
        if not parts:
            raise ConfigError(
                "nothing rewards the episodes: give the trainer a reward, or the environment get_reward()"
            )
        super().__init__(parts, make_reward, partial=True)
        self._episode = episode
        for source in leaves(self):
            if isinstance(source, FunctionReward) and PARAMETER in source.form.named:
                _bind(source, episode)

    def check_values(self, where: str, batch: Batch) -> None:
        """Raises DataError if a row chooses an environment that there is not."""
        self._episode.check_values(where, batch)

    async def score(self, batch: Batch) -> RewardResult:
        if not self._episode.is_read:
            return await super().score(batch)
        try:
            return await super().score(batch.add({PARAMETER: batch["id"]}))
        finally:
            self._episode.release(batch["id"])


def with_episodes(reward: Any, episode: Any) -> Any:
    """The reward of a trainer, which may be None, with what its episodes say of themselves.

    Raises:
        ConfigError: as of `EnvironmentSum`.
    """
    if hasattr(episode, "rewards"):  # environments, whose rewards are summed with it
        return EnvironmentSum(reward, episode)
    missing = "the agent returned no reward, and the trainer has none: return one, or give it reward=..."
    return EnvironmentReward("episode", missing=missing) if reward is None else reward


def _bind(source: FunctionReward, episode: Any) -> None:
    """Have a function called in this process, on environments in the place of the ids of their rows."""
    if not isinstance(source.group, ProcessCaller | ThreadCaller):
        raise ConfigError(f"reward '{source.name}' reads environments, which are in this process: leave workers out")
    source.group.close()
    source.function = _with_environments(source.function, episode)
    # Until there are samples no data have this column.
    source.form = source.form._replace(required=source.form.required - {PARAMETER})
    source.group = ThreadCaller(source.function, source.name)
    episode.is_read = True


def _with_environments(function: Callable[..., Any], episode: Any) -> Callable[..., Any]:
    def instead(columns: Mapping[str, Any]) -> dict[str, Any]:
        instances = [episode.of_row(row_id) for row_id in columns[PARAMETER]]
        if any(instance is None for instance in instances):
            raise RewardError(
                "environments are in the processes that generate: rewards read them where that is this one"
            )
        return {**columns, PARAMETER: instances}

    def call(*args: Any, **columns: Any) -> Any:
        return function(*args, **instead(columns))

    async def call_async(*args: Any, **columns: Any) -> Any:
        return await function(*args, **instead(columns))

    return functools.update_wrapper(call_async if is_async(function) else call, function)
