"""The engine that `rollout.name: auto` stands for in a run: settled when it begins, kept in its directory.

So a run that is resumed where vLLM has been installed, or is missing, goes on with the engine with which it began.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from verl.config import Config
from verl.durable import read_json, write_atomic
from verl.errors import ConfigError
from verl.roles.actor import Actor

FILE = "engine.json"
_Kept = dict[Literal["name"], str]


def with_engine(config: Config, directory: Path) -> Config:
    """`config` with the engine that the run's `directory` keeps in the place of "auto".

    Raises:
        ConfigError: what the directory keeps is damaged.
    """
    file = directory / FILE
    if config.actor_rollout_ref.rollout.name != "auto" or not file.exists():
        return config
    try:
        return _named(config, read_json(file, _Kept)["name"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{file} is damaged ({error}): give rollout.name, or start anew") from error


def settle_engine(config: Config, actor: Actor, directory: Path) -> Config:
    """`config` with the engine that the actor takes for "auto", which the run's `directory` keeps from now on."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "auto" or rollout.url:
        return config
    name = str(actor.settle_engine())
    write_atomic(directory / FILE, json.dumps({"name": name}) + "\n")
    return _named(config, name)


def _named(config: Config, name: str) -> Config:
    policy = config.actor_rollout_ref
    return config.replace(actor_rollout_ref=policy.replace(rollout=policy.rollout.replace(name=name)))
