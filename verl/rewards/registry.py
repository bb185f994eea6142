"""The names of rewards: the built-in ones, and those that users register."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from verl._base.checked import checked
from verl._base.names import give_name
from verl._base.record import Name
from verl.errors import ConfigError

RewardT = TypeVar("RewardT", bound=Callable[..., Any])
#: By the names that `Reward` and settings take: the built-in ones, each by its module and name there, and functions and
#: classes of users.
REWARDS: dict[str, Any] = {
    "task": "verl.rewards.reasoning_gym:TaskReward",
    "reasoning_gym": "verl.rewards.reasoning_gym:TaskReward",
    "code": "verl.rewards.code:CodeReward",
    "code_evaluator": "verl.rewards.code:CodeReward",
    "data_source": "verl.rewards.by_source:score_by_source",
    "math": "verl.rewards.maths:MathReward",
    "rm_hf": "verl.rewards.model:RewardModel",
}


@checked
def register_reward(name: Name) -> Callable[[RewardT], RewardT]:
    """Decorator that gives a reward a name, by which `Reward` and settings take it. It is a function of any form that
    `Reward` knows; or a class, made with the reward's options, whose objects are such functions or
    `RewardSource`s. A second one of the same name and module replaces the first (a notebook cell run twice).

    Raises:
        ConfigError: it cannot be called, or the name belongs to another reward.
    """

    def register(reward: RewardT) -> RewardT:
        if not callable(reward):
            raise ConfigError(f"reward '{name}' must be a function or a class, not a {type(reward).__name__}")
        give_name(REWARDS, "reward", name, reward)
        return reward

    return register
