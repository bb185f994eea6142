"""The files besides data and weights that a run's numbers depend on, so that a change between two attempts is seen."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from verl._base.durable import digest
from verl._host.user_functions import load_function, shown_path, user_files
from verl.config import Config
from verl.errors import ConfigError
from verl.run.planned import reward_models

#: Of a model's directory: what a model, a tokenizer and their own code are made from, and the weights.
_SMALL, _WEIGHTS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"), (".safetensors", ".bin")


def inputs_of(config: Config) -> tuple[dict[str, str], tuple[str, ...]]:
    """The user's code that is imported so far, and the files that the settings name or that commands of agents run.

    Returns:
        SHA-256 of files by path; and the folders of which every file counts, one that is added, too.

    Raises:
        ConfigError: one of `reward.files` is not there.
    """
    files, models = user_files(), dict(_models(config))
    rollout = config.actor_rollout_ref.rollout
    episode = None if rollout.episode is None else load_function(rollout.episode)
    for path in map(Path, (*config.reward.files, *getattr(episode, "files", ()))):
        if not path.is_file():
            raise ConfigError(f"reward.files: there is no file '{path}' (working directory {Path.cwd()})")
        files[shown_path(path.resolve())] = digest(path)
    for name, is_scored in models.items():
        folder = _folder(name)
        endings = (*_SMALL, *(_WEIGHTS if is_scored else ()))
        for file in sorted(folder.iterdir()) if folder is not None else ():
            if file.suffix in endings and file.is_file():
                files[f"{name}/{file.name}"] = digest(file)
    return files, tuple(models)


def _models(config: Config) -> Iterator[tuple[str, bool]]:
    """Models and tokenizers by directory or hub name, and whether their weights are hashed: policies,
    critics and references have theirs in checkpoints, or are compared with these."""
    policy, critic = config.actor_rollout_ref, config.critic
    for name in (policy.model.path, policy.model.tokenizer, policy.ref.path, critic.model.path, critic.model.tokenizer):
        if name is not None:
            yield name, False
    for _, part in reward_models(config):
        yield str(part.model), True
    for task in config.tasks:
        if isinstance(task.reward_model, str) and Path(task.reward_model).is_dir():
            yield task.reward_model, True


def _folder(name: str) -> Path | None:
    """The directory of a model's files: its own, or a hub model's in the cache."""
    if os.path.isdir(path := os.path.expanduser(name)):
        return Path(path)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # it is no name of a hub
        return None
    return Path(cached).parent if isinstance(cached, str) else None
