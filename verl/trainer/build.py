"""From a run's settings to its parts: actor, critic, reward, data, trainer."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from verl.algorithms import BaseAlgorithm, make_algorithm
from verl.config import Config, RewardPart, UpdateConfig
from verl.data.loader import PromptLoader
from verl.data.prompts import PromptDataset, PromptStream, check_disjoint, load_prompts
from verl.data.tokenize import tokenize_prompts
from verl.errors import ConfigError, DataError
from verl.models.loading import load_model
from verl.models.memory import ModelSize, available_memory, estimate_memory, preflight
from verl.roles.actor import Actor
from verl.roles.critic import Critic
from verl.roles.reward import Reward
from verl.rollout.base import SamplingParams
from verl.trainer.logging import Logger
from verl.trainer.trainer import Trainer
from verl.workers.update import UpdatePlan

logger = logging.getLogger(__name__)


@dataclass
class Prompts:
    """The data of a run: endless training batches, held-out problems, and what was done to them, in words."""

    train: PromptLoader
    held_out: PromptDataset | None
    notes: list[str]


def build_algorithm(config: Config) -> BaseAlgorithm:
    return make_algorithm(config.algorithm.name, **config.algorithm.options)


def build_actor(config: Config) -> Actor:
    """The policy, loaded; its reference policy too where one is given."""
    policy, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    actor = Actor(
        policy.model.path or "",
        policy.model.tokenizer,
        dtype=policy.model.dtype,
        rollout=rollout.name,
        episode=rollout.episode,
        sampling=SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            min_new_tokens=rollout.min_new_tokens,
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            min_p=rollout.min_p,
            stop=rollout.stop,
        ),
        max_num_seqs=rollout.max_num_seqs,
        kv_cache_gb=rollout.kv_cache_gb,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        trust_remote_code=policy.model.trust_remote_code,
        gradient_checkpointing=policy.model.enable_gradient_checkpointing,
        seed=config.trainer.seed,
        **_training(config, policy.actor),
    )
    if policy.ref.path is not None:
        actor.make_reference(load_model(policy.ref.path, dtype=policy.model.dtype))
    return actor


def build_critic(config: Config) -> Critic:
    """The value model of the settings; the actor's own model where they name none."""
    model = config.critic.model
    path = model.path or config.actor_rollout_ref.model.path or ""
    tokenizer = model.tokenizer or (path if model.path else None)
    return Critic(
        path,
        tokenizer,
        dtype=model.dtype,
        gradient_checkpointing=model.enable_gradient_checkpointing,
        trust_remote_code=model.trust_remote_code,
        seed=config.trainer.seed,
        **_training(config, config.critic),
    )


def build_reward(config: Config) -> Reward:
    """The reward, or the weighted sum of several.

    Raises:
        ConfigError: the settings name no reward.
    """
    given = config.reward
    options: dict[str, Any] = {
        "timeout": given.timeout,
        "retries": given.retries,
        "max_failure_rate": given.max_failure_rate,
        "default_reward": None if given.on_failure == "abstain" else given.on_failure,
    }
    if given.components:
        parts = {name: {**_part(part), "weight": part.weight} for name, part in given.components.items()}
        return Reward(parts, **options)
    if not given.given():
        raise ConfigError("no reward is given: set reward.path=FILE.py:FUNCTION, reward.name=task or reward.model")
    part = _part(given)
    return Reward(part.pop("source"), **part, **options)


def build_prompts(config: Config, actor: Actor) -> Prompts:
    """Training and held-out prompts, tokenised; held-out ones that occur in training are left out.

    Raises:
        ConfigError: no training data are named.
        DataError: the data are unusable; see `load_prompts` and `tokenize_prompts`.
    """
    data = config.data
    if data.train is None:
        raise ConfigError("data.train is missing: give a JSONL or Parquet file, or {task: NAME, ...}")
    train, notes = _load(config, data.train, actor)
    loader = PromptLoader(train, data.batch_size, seed=config.trainer.seed, shuffle=data.shuffle or None)
    if data.eval is None:
        return Prompts(loader, None, notes)
    held_out, more = _load(config, data.eval, actor)
    notes += more
    if isinstance(held_out, PromptStream):
        raise DataError("data.eval is a stream: held-out problems must have a number")
    if isinstance(train, PromptDataset):
        held_out, overlap = check_disjoint(train, held_out)
        if overlap:
            notes.append(f"{overlap} held-out prompts occur in training and were left out")
    return Prompts(loader, held_out, notes)


def check_memory(config: Config, algorithm: BaseAlgorithm, actor: Actor) -> None:
    """Refuse a run that will not fit in memory, before it starts.

    Raises:
        ConfigError: with what is needed, what there is, and the setting to change.
    """
    size = ModelSize.from_model(actor.model)
    update, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    estimate = preflight(
        size,
        key="actor_rollout_ref.actor",
        max_tokens_per_micro_batch=update.max_tokens_per_micro_batch or 16384,
        kv_tokens=int((rollout.kv_cache_gb or 0.0) * 2**30 / max(size.kv_bytes_per_token, 1)),
        gradient_checkpointing=config.actor_rollout_ref.model.enable_gradient_checkpointing,
        available=available_memory() - _others(algorithm, size),
    )
    logger.info("memory of training the actor: about %s", estimate)


def build_trainer(config: Config, algorithm: BaseAlgorithm, actor: Actor, logger: Logger) -> Trainer:
    """The trainer over all of it."""
    settings = config.trainer
    return Trainer(
        actor,
        build_critic(config) if "critic" in algorithm.roles else None,
        build_reward(config),
        algorithm=algorithm,
        n=config.actor_rollout_ref.rollout.n,
        max_resamples=settings.max_resamples,
        max_skipped_updates=settings.max_skipped_updates,
        permute_rewards=settings.control == "permute_rewards",
        deadline=settings.deadline,
        logger=logger,
    )


def _others(algorithm: BaseAlgorithm, size: ModelSize) -> int:
    """Bytes of the models beside the actor, taken to be of its size."""
    reference = estimate_memory(size, trained=False).total if "reference" in algorithm.roles else 0
    critics = len(algorithm.roles & {"critic", "cost_critic"})
    return reference + critics * estimate_memory(size).total


def _training(config: Config, update: UpdateConfig) -> dict[str, Any]:
    optim = update.optim
    if config.trainer.control == "zero_lr":
        optim = optim.model_copy(update={"lr": 0.0})
    if optim.total_steps is None and optim.schedule != "constant":
        samples = config.data.batch_size * config.actor_rollout_ref.rollout.n
        updates = UpdatePlan(update.mini_batch_size, update.epochs).updates(samples)
        optim = optim.model_copy(update={"total_steps": max(1, config.trainer.total_steps * updates)})
    return {
        "optim": optim,
        "mini_batch_size": update.mini_batch_size,
        "epochs": update.epochs,
        "micro_batch_size": update.train_micro_batch_size_per_gpu,
        "max_tokens_per_micro_batch": update.max_tokens_per_micro_batch,
    }


def _part(part: RewardPart) -> dict[str, Any]:
    (origin,) = part.given()
    if origin == "name":
        return {"source": part.name, **({} if part.answer == "whole" else {"answer": part.answer})}
    return {"source": getattr(part, origin)}


def _load(config: Config, source: Any, actor: Actor) -> tuple[PromptDataset | PromptStream, list[str]]:
    data = config.data
    prompts = load_prompts(
        source,
        prompt_column=data.prompt_column,
        template=data.prompt_template,
        system_prompt=data.system_prompt,
        chat=data.chat,
    )
    positions = getattr(actor.model.config.get_text_config(), "max_position_embeddings", None)
    # One position is left for a response at least.
    limit = min(data.max_prompt_length or positions or 2**31, (positions or 2**31) - 1)
    tokens, counts = tokenize_prompts(
        prompts, actor.tokenizer, max_prompt_length=limit, truncation=data.truncation, tools=actor.tools
    )
    notes = [f"{counts[what]} prompts of {prompts.name} are longer than {limit} tokens and were {what}"
             for what in ("dropped", "truncated") if counts[what]]  # fmt: skip
    return tokens, notes
