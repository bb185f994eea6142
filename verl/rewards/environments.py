"""Rewards that environments and agents give their own episodes, with or without the trainer's rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl.batch import Batch
from verl.errors import ConfigError
from verl.rewards.calls import FunctionCaller, ThreadCaller
from verl.rewards.composite import CompositeReward
from verl.rewards.functions import FunctionReward
from verl.rewards.make import make_reward
from verl.rewards.scores import Call, Score, failure, read_score
from verl.rewards.source import RewardResult, leaves

#: What the parameter of a reward function is called that gets the environments of its samples.
PARAMETER = "environments"


@dataclass(eq=False)
class EnvironmentReward:
    """`get_reward()` of the environments of one class, called when their episodes ended.

    Args:
        name: of the class.
        chosen_by: values of the column `environment` that stand for it; None: there is no other class.
        missing: why a sample without a reward of its episode abstains; None: it belongs to another class.
    """

    whole_batch = False
    columns = ("episode_reward?", "environment?")
    name: str
    chosen_by: Sequence[str] | None = None
    missing: str | None = None

    async def score(self, batch: Batch) -> RewardResult:
        rewards = batch["episode_reward"] if "episode_reward" in batch else [None] * len(batch)
        if self.chosen_by is not None:
            rewards = [r if e in self.chosen_by else None for r, e in zip(rewards, batch["environment"], strict=True)]
        result = RewardResult([None] * len(batch), reasons=[self.missing] * len(batch))
        for row, reward in enumerate(rewards):
            if reward is not None:
                score = read_score(reward)
                result.reward[row] = score.value
                result.reasons[row] = score.reason and f"{self.name}.get_reward() {score.reason}"
        return result


class EnvironmentSum(CompositeReward):
    """The rewards of a trainer and of its environments, summed as TRL sums them: a missing one is left out.

    Functions with a parameter `environments` get the environments of their samples, in their state after the episodes.

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
        self._episode, self.check_values = episode, episode.check_values
        for source in leaves(self):
            if isinstance(source, FunctionReward) and PARAMETER in source.signature.named:
                self._bind(source)

    def _bind(self, source: FunctionReward) -> None:
        """Have a function called in this process, with environments."""
        if not isinstance(source.group, FunctionCaller):
            raise ConfigError(
                f"reward '{source.name}' reads environments, which are in this process: leave workers out"
            )
        source.group.close()
        # Until there are samples no data have this column.
        source.signature = source.signature._replace(required=source.signature.required - {PARAMETER})
        source.group = _EnvironmentCaller(source.function, source.name, self._episode)
        self._episode.is_read = True

    async def score(self, batch: Batch) -> RewardResult:
        if not self._episode.is_read:
            return await super().score(batch)
        try:
            return await super().score(batch.add({PARAMETER: batch["id"]}))
        finally:
            self._episode.release(batch["id"])


def with_episodes(reward: Any, episode: Any) -> Any:
    """The reward of a trainer, which may be None, with the rewards of its episodes.

    Raises:
        ConfigError: as of `EnvironmentSum`.
    """
    if hasattr(episode, "rewards"):  # environments, whose rewards are summed with it
        return EnvironmentSum(reward, episode)
    missing = "the agent returned no reward, and the trainer has none: return one, or give it reward=..."
    return EnvironmentReward("episode", missing=missing) if reward is None else reward


class _EnvironmentCaller(ThreadCaller):
    """Calls a function in this process, with environments in place of the ids of their rows."""

    def __init__(self, function: Callable[..., Any], name: str, episode: Any) -> None:
        super().__init__(function, name)
        self._episode = episode

    async def call(self, call: Call, timeout: float) -> list[Score] | None:
        instances = [self._episode.held.get(row_id, (None, None))[1] for row_id in call.kwargs[PARAMETER]]
        if any(instance is None for instance in instances):
            return [
                failure("environments are in the processes that generate: rewards read them where that is this one")
            ]
        return await super().call(call._replace(kwargs={**call.kwargs, PARAMETER: instances}), timeout)
