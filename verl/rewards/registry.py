"""The names of rewards: the built-in ones, and those that users register."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from verl._base.checked import checked
from verl._base.names import give_name
from verl._base.record import Name
from verl.errors import ConfigError

RewardT = TypeVar("RewardT", bound=Callable[..., Any])
#: Functions and classes of users, by name.
REGISTERED: dict[str, Any] = {}
#: Names that `Reward` and settings take: the built-in ones, and those that are registered.
REWARDS = {"task", "code", "code_evaluator", "data_source", "math", "reasoning_gym", "rm_hf"}


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
        if name in REWARDS and name not in REGISTERED:
            raise ConfigError(f"reward name '{name}' is taken by a built-in reward: choose another")
        give_name(REGISTERED, "reward", name, reward)
        REWARDS.add(name)
        return reward

    return register
