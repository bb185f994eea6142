"""What can be found wrong with a run's settings without a model: `verl train` and its dry run both begin here."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from verl.algorithms import BaseAlgorithm, make_algorithm
from verl.batch import Batch
from verl.config import Config, CostConfig, CriticConfig, RewardPart
from verl.data.offline import OfflineDatasetLoader, is_recorded
from verl.data.prompts import PromptDataset, load_prompts
from verl.errors import ConfigError
from verl.rewards.forms import recognise
from verl.rewards.loading import load_function
from verl.rewards.make import make_reward
from verl.trainer.logging import check_loggers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checked:
    """What the settings name and needs no model, found and read; data are not tokenised yet.

    rows: those that one step learns from; groups of recorded data may differ in size, then about.
    """

    algorithm: BaseAlgorithm
    metrics: dict[str, Callable[[Batch], Any]]
    train: PromptDataset | OfflineDatasetLoader
    held_out: PromptDataset | OfflineDatasetLoader | None
    rows: int


def check_settings(config: Config) -> Checked:
    """Everything that a run needs besides its models, before anything is made. Imports the user's functions, and
    reads the data.

    Raises:
        ConfigError: settings contradict each other, or name what is not there.
        DataError: the data are unusable; see `load_prompts` and `OfflineDatasetLoader`.
        RewardError: a file of the user's cannot be imported.
    """
    algorithm = _algorithm(config)
    _check_trainer(config, algorithm)
    _check_places(config)
    for section in (config.reward, config.cost):
        for part in section.components.values() or [section]:
            _check_source(part)
    metrics = {spec: load_function(spec) for spec in config.trainer.eval_metrics}
    train: PromptDataset | OfflineDatasetLoader
    train = _recorded(config, "train") if is_offline(config, algorithm) else _prompts(config, config.data.train)
    rows = _step_rows(config, train)
    held_out: PromptDataset | OfflineDatasetLoader | None = None
    if config.data.eval is not None:  # an online algorithm may learn from what is recorded; it is judged by its own
        held_out = _prompts(config, config.data.eval) if algorithm.online else _recorded(config, "eval")
    return Checked(algorithm, metrics, train, held_out, rows)


def is_offline(config: Config, algorithm: BaseAlgorithm) -> bool:
    """Whether the run learns from recorded responses: the algorithm always does, or the data are experience."""
    return not algorithm.online or is_recorded(_file(config.data.train) or "")


def source_options(part: RewardPart) -> dict[str, Any]:
    """The one origin of a reward as `source`, with its own options."""
    (origin,) = part.given()
    if origin == "name":
        return {"source": part.name, **({} if part.answer == "whole" else {"answer": part.answer})}
    if origin == "model":
        return {"source": part.model, "dtype": part.dtype}
    return {"source": getattr(part, origin), **({} if part.template is None else {"template": part.template})}


def check_permuted(algorithm: BaseAlgorithm) -> None:
    """Raises ConfigError where rewards that are dealt out at random would be no control."""
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
            "standalone rollout workers take an engine by name or FILE.py:CLASS, and no episode: train "
            "synchronously, or leave rollout.episode out"
        )
    if tensor_parallel > 1:
        raise ConfigError(
            "a standalone rollout worker has a whole model: leave rollout.tensor_model_parallel_size out, train "
            "synchronously, or generate with vllm"
        )


def _algorithm(config: Config) -> BaseAlgorithm:
    """The algorithm, once its demands and the other settings are found to agree."""
    algorithm = make_algorithm(config.algorithm.name, **config.algorithm.options)
    algorithm.check_samples(config.actor_rollout_ref.rollout.n)
    for role in ("reward", "cost"):
        section: CostConfig = getattr(config, role)
        if section.is_given and role not in algorithm.roles:
            raise ConfigError(f"algorithm '{algorithm.name}' has no {role}: leave the section '{role}' out")
        if not section.is_given and role in algorithm.roles:
            raise ConfigError(f"no {role} is given: set {role}.path=FILE.py:FUNCTION, {role}.name=task or {role}.model")
    reference = config.actor_rollout_ref.ref
    if (reference.path or reference.dtype) is not None and "reference" not in algorithm.roles:
        reads = "set algorithm.kl_in to reward or loss, or " if hasattr(algorithm, "kl_in") else ""
        raise ConfigError(
            f"actor_rollout_ref.ref: algorithm '{algorithm.name}' has no reference as it is set: {reads}leave the "
            "section out"
        )
    if config.critic != CriticConfig() and "critic" not in algorithm.roles:
        logger.warning("algorithm '%s' has no critic as it is set: the section 'critic' is not used", algorithm.name)
    data = config.data
    if is_offline(config, algorithm):
        for key in ("prompt_column", "prompt_template", "chat"):
            if getattr(data, key) is not None:
                raise ConfigError(f"data.{key} is for prompts; recorded responses are read by their own columns")
    elif data.max_response_length is not None:
        raise ConfigError(
            "data.max_response_length is for recorded responses: set actor_rollout_ref.rollout.max_new_tokens"
        )
    if not algorithm.online and config.trainer.eval_metrics:
        raise ConfigError(f"trainer.eval_metrics are for sampled responses; '{algorithm.name}' samples none")
    return algorithm


def _check_trainer(config: Config, algorithm: BaseAlgorithm) -> None:
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if trainer.threads is not None and trainer.threads > (cores := os.cpu_count() or 1):
        raise ConfigError(f"trainer.threads: must be at most {cores}, the CPU cores here, not {trainer.threads}")
    check_loggers(trainer.loggers)
    if trainer.control == "permute_rewards":
        check_permuted(algorithm)
    if trainer.max_staleness is not None:
        check_asynchronous(algorithm, None if rollout.url else rollout.name, rollout.episode, rollout.tensor_parallel)


def _check_places(config: Config) -> None:
    """Files and directories that the settings name are there; whether a hub knows a name is not asked."""
    policy, critic = config.actor_rollout_ref, config.critic
    models = {
        "actor_rollout_ref.model.path": policy.model.path,
        "actor_rollout_ref.ref.path": policy.ref.path,
        "critic.model.path": critic.model.path,
        "reward.model": config.reward.model,
        "cost.model": config.cost.model,
    }
    for key, name in models.items():
        if name is not None and name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
            raise ConfigError(f"{key}: there is no directory '{name}' (working directory {Path.cwd()})")
    for spec in (policy.rollout.name, policy.rollout.episode):
        if spec is not None and ".py:" in spec:
            load_function(spec)


def _check_source(part: RewardPart) -> None:
    """The function or built-in reward of a section; a model or a server is met later."""
    if part.path is not None:
        recognise(load_function(part.path))
    if part.name is not None:
        make_reward(**source_options(part))


def _prompts(config: Config, source: Any) -> PromptDataset:
    data = config.data
    if source is None:
        raise ConfigError("data.train is missing: give a JSONL or Parquet file, or {task: NAME, ...}")
    return load_prompts(
        source,
        prompt_column=data.prompt_column,
        template=data.prompt_template,
        system_prompt=data.system_prompt,
        chat=data.chat,
    )


def _recorded(config: Config, split: str) -> OfflineDatasetLoader:
    data = config.data
    file = _file(getattr(data, split))
    if file is None:
        raise ConfigError(f"data.{split} must be a JSONL or Parquet file of recorded responses")
    return OfflineDatasetLoader(
        file,
        batch_size=data.batch_size,
        seed=config.trainer.seed,
        shuffle=data.shuffle,
        system_prompt=data.system_prompt,
        max_response_length=data.max_response_length,
        truncation=data.truncation,
    )


def _step_rows(config: Config, train: PromptDataset | OfflineDatasetLoader) -> int:
    if isinstance(train, PromptDataset):
        return config.data.batch_size * config.actor_rollout_ref.rollout.n
    rows = ceil(config.data.batch_size * len(train.batch) / len(train))
    for key, update in (("actor_rollout_ref.actor", config.actor_rollout_ref.actor), ("critic", config.critic)):
        if (update.mini_batch_size or 0) > rows:
            raise ConfigError(
                f"{key}.mini_batch_size must be at most the {rows} rows of a step (data.batch_size "
                f"{config.data.batch_size} of {train.kind}), not {update.mini_batch_size}"
            )
    return rows


def _file(source: Any) -> str | None:
    """The file that a source names, if it names one and nothing else."""
    if isinstance(source, dict):
        return source["path"] if list(source) == ["path"] else None
    return source  # type: ignore[no-any-return]
