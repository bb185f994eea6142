"""From a run's settings to its parts: actor, critic, reward, data, trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

from verl.algorithms import BaseAlgorithm, make_algorithm
from verl.batch import Batch
from verl.config import Config, RewardConfig, RewardPart, UpdateConfig
from verl.controller.controller import Controller
from verl.controller.placement import ROLES
from verl.controller.ranks import local_ranks
from verl.data.loader import PromptLoader
from verl.data.offline import OfflineDatasetLoader, is_recorded
from verl.data.prefetch import Loader, Prefetch
from verl.data.prompts import PromptDataset, PromptStream, check_disjoint, load_prompts
from verl.data.tokenize import tokenize_prompts
from verl.errors import ConfigError, DataError
from verl.models.loading import load_model
from verl.models.memory import ModelSize, available_memory, estimate_memory, preflight
from verl.roles.actor import Actor
from verl.roles.backends import vLLMWorker
from verl.roles.critic import Critic
from verl.roles.reward import Reward
from verl.rollout.base import SamplingParams
from verl.trainer.asynchronous import AsyncTrainer
from verl.trainer.logging import Logger
from verl.trainer.trainer import Trainer
from verl.workers.update import UpdatePlan

logger = logging.getLogger(__name__)


@dataclass
class RunData:
    """The data of a run: endless training batches, what is held out, and what was done to them, in words.

    `held_out` is problems to sample and score, or recorded rows whose loss is measured; None: no evaluation.
    """

    train: Loader[Batch]
    held_out: PromptDataset | Batch | None
    notes: list[str]


def build_algorithm(config: Config) -> BaseAlgorithm:
    """The algorithm, once its demands and the other settings are found to agree.

    Raises:
        ConfigError: they contradict each other.
    """
    algorithm = make_algorithm(config.algorithm.name, **config.algorithm.options)
    algorithm.check_samples(config.actor_rollout_ref.rollout.n)
    for role in ("reward", "cost"):
        section: RewardConfig = getattr(config, role)
        if section.is_given and role not in algorithm.roles:
            raise ConfigError(f"algorithm '{algorithm.name}' has no {role}: leave the section '{role}' out")
        if not section.is_given and role in algorithm.roles:
            raise ConfigError(f"no {role} is given: set {role}.path=FILE.py:FUNCTION, {role}.name=task or {role}.model")
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


def is_offline(config: Config, algorithm: BaseAlgorithm) -> bool:
    """Whether the run learns from recorded responses: the algorithm always does, or the data are experience."""
    return not algorithm.online or is_recorded(_file(config.data.train) or "")


def read_recorded(config: Config, algorithm: BaseAlgorithm) -> OfflineDatasetLoader | None:
    """The recorded training data, not tokenised yet; None for a run that samples.

    Raises:
        ConfigError: no file of them is named, or a mini-batch is larger than a step.
        DataError: the data are unusable; see `OfflineDatasetLoader`.
    """
    if not is_offline(config, algorithm):
        return None
    loader = _recorded(config, "train")
    rows = step_rows(config, loader)
    for key, update in (("actor_rollout_ref.actor", config.actor_rollout_ref.actor), ("critic", config.critic)):
        if (update.mini_batch_size or 0) > rows:
            raise ConfigError(
                f"{key}.mini_batch_size must be at most the {rows} rows of a step (data.batch_size "
                f"{config.data.batch_size} of {loader.kind}), not {update.mini_batch_size}"
            )
    return loader


def step_rows(config: Config, recorded: OfflineDatasetLoader | None) -> int:
    """Rows that one step learns from; groups of recorded data may differ in size, then about."""
    if recorded is None:
        return config.data.batch_size * config.actor_rollout_ref.rollout.n
    return ceil(config.data.batch_size * len(recorded.batch) / len(recorded))


def build_controller(config: Config) -> Controller:
    """Where the roles run.

    Raises:
        ConfigError: the map of placement cannot be met.
    """
    return Controller(config.trainer.placement, timeout=config.trainer.deadline)


def placed_roles(algorithm: BaseAlgorithm) -> list[str]:
    """The roles of an algorithm that have a place in the map."""
    generates = ["rollout"] if algorithm.online else []
    return ["actor", *generates, *(role for role in ROLES if role in algorithm.roles - {"actor"})]


def build_actor(config: Config, algorithm: BaseAlgorithm, rows: int, controller: Controller | None = None) -> Actor:
    """The model that is trained, loaded under the head that the algorithm asks for; its reference policy too where
    one is given. `rows` are those of a step."""
    policy, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    actor = Actor(
        policy.model.path or "",
        policy.model.tokenizer,
        dtype=policy.model.dtype,
        rollout=vLLMWorker(rollout.url) if rollout.url else rollout.name,
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
        batch_invariant=rollout.batch_invariant,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        trust_remote_code=policy.model.trust_remote_code,
        gradient_checkpointing=policy.model.enable_gradient_checkpointing,
        fused_kernels=policy.model.fused_kernels,
        head=algorithm.head,
        placement=controller,
        seed=config.trainer.seed,
        **_training(config, policy.actor, rows),
    )
    if policy.ref.path is not None:
        actor.make_reference(load_model(policy.ref.path, dtype=policy.model.dtype))
    return actor


def build_critic(config: Config, rows: int, controller: Controller | None = None) -> Critic:
    """The value model of the settings; the actor's own model where they name none."""
    model = config.critic.model
    path = model.path or config.actor_rollout_ref.model.path or ""
    tokenizer = model.tokenizer or (path if model.path else None)
    return Critic(
        path,
        tokenizer,
        dtype=model.dtype,
        gradient_checkpointing=model.enable_gradient_checkpointing,
        fused_kernels=model.fused_kernels,
        trust_remote_code=model.trust_remote_code,
        placement=controller,
        seed=config.trainer.seed,
        **_training(config, config.critic, rows),
    )


def build_source(given: RewardConfig) -> Reward | None:
    """The reward or cost of a section, or the weighted sum of several; None where it names none."""
    if not given.is_given:
        return None
    options: dict[str, Any] = {
        "timeout": given.timeout,
        "retries": given.retries,
        "max_failure_rate": given.max_failure_rate,
        "workers": given.workers,
        "max_workers": given.max_workers,
        "default_reward": None if given.on_failure == "abstain" else given.on_failure,
    }
    if given.components:
        parts = {name: {**_part(part), "weight": part.weight} for name, part in given.components.items()}
        return Reward(parts, **options)
    part = _part(given)
    return Reward(part.pop("source"), **part, **options)


def build_data(
    config: Config, algorithm: BaseAlgorithm, actor: Actor, recorded: OfflineDatasetLoader | None
) -> RunData:
    """Training and held-out data, tokenised; what is held out and has a prompt of the training data is left out.

    Raises:
        ConfigError: no training data are named.
        DataError: the data are unusable; see `load_prompts`, `tokenize_prompts` and `OfflineDatasetLoader`.
    """
    return _prompt_data(config, actor) if recorded is None else _recorded_data(config, algorithm, actor, recorded)


def _prompt_data(config: Config, actor: Actor) -> RunData:
    data = config.data
    if data.train is None:
        raise ConfigError("data.train is missing: give a JSONL or Parquet file, or {task: NAME, ...}")
    train, notes = _load(config, data.train, actor)
    loader = PromptLoader(train, data.batch_size, seed=config.trainer.seed, shuffle=data.shuffle or None)
    if data.eval is None:
        return RunData(Prefetch(loader), None, notes)
    held_out, more = _load(config, data.eval, actor)
    notes += more
    if isinstance(held_out, PromptStream):
        raise DataError("data.eval is a stream: held-out problems must have a number")
    if isinstance(train, PromptDataset):
        held_out, overlap = check_disjoint(train, held_out)
        if overlap:
            notes.append(f"{overlap} held-out prompts occur in training and were left out")
    return RunData(Prefetch(loader), held_out, notes)


def _recorded_data(config: Config, algorithm: BaseAlgorithm, actor: Actor, train: OfflineDatasetLoader) -> RunData:
    notes = _tokenize(config, train, actor, "train")
    if config.data.eval is None:
        return RunData(Prefetch(train), None, notes)
    problems: PromptDataset | PromptStream | None = None
    if algorithm.online:  # it learns from recorded responses, and is judged by its own
        problems, more = _load(config, config.data.eval, actor)
        if isinstance(problems, PromptStream):
            raise DataError("data.eval is a stream: held-out problems must have a number")
        rows = problems.batch
    else:
        held_out = _recorded(config, "eval")
        more = _tokenize(config, held_out, actor, "eval")
        rows = held_out.batch
    seen = set(map(tuple, train.batch["prompt_tokens"]))
    keep = [tuple(prompt) not in seen for prompt in rows["prompt_tokens"]]
    if not any(keep):
        raise DataError("all held-out prompts occur in training (data.train): give other data.eval")
    if not all(keep):
        more.append(f"{keep.count(False)} held-out rows have a prompt of the training data and were left out")
    rows = rows.filter(keep)
    return RunData(Prefetch(train), PromptDataset(rows, problems.name) if problems else rows, notes + more)


def check_memory(config: Config, algorithm: BaseAlgorithm, actor: Actor) -> None:
    """Refuse a run that will not fit in memory, before it starts.

    Raises:
        ConfigError: with what is needed, what there is, and the setting to change.
    """
    fused = config.actor_rollout_ref.model.use_fused_kernels
    size = ModelSize.from_model(actor.model)
    size = replace(size, fused=size.fused and fused)
    update, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    estimate = preflight(
        size,
        key="actor_rollout_ref.actor",
        max_tokens_per_micro_batch=update.max_tokens_per_micro_batch or 16384,
        kv_tokens=int((rollout.kv_cache_gb or 0.0) * 2**30 / max(size.kv_bytes_per_token, 1)),
        gradient_checkpointing=config.actor_rollout_ref.model.enable_gradient_checkpointing,
        moments=update.optim.moments,
        cut_over=len(actor.controller.mesh.pool("actor")) if update.strategy == "fsdp" else 1,
        available=available_memory() // local_ranks() - _others(algorithm, size),
    )
    logger.info("memory of training the actor: about %s", estimate)


def build_trainer(config: Config, algorithm: BaseAlgorithm, actor: Actor, rows: int, logger: Logger) -> Trainer:
    """The trainer over all of it."""
    settings, rollout = config.trainer, config.actor_rollout_ref.rollout
    if settings.max_staleness is None:
        make: Callable[..., Trainer] = Trainer
    else:
        make = partial(
            AsyncTrainer,
            batch_size=config.data.batch_size,
            max_staleness=settings.max_staleness,
            rollout_workers=rollout.num_rollout_workers,
            max_rollout_workers=rollout.max_rollout_workers,
            transport=rollout.transport,
        )
    return make(
        actor,
        build_critic(config, rows, actor.controller) if "critic" in algorithm.roles else None,
        build_source(config.reward),
        cost=build_source(config.cost),
        algorithm=algorithm,
        n=rollout.n,
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


def _training(config: Config, update: UpdateConfig, rows: int) -> dict[str, Any]:
    optim = update.optim
    if config.trainer.control == "zero_lr":
        optim = optim.model_copy(update={"lr": 0.0})
    if optim.total_steps is None and optim.schedule != "constant":
        updates = UpdatePlan(update.mini_batch_size, update.epochs).updates(rows)
        optim = optim.model_copy(update={"total_steps": max(1, config.trainer.total_steps * updates)})
    return {
        "optim": optim,
        "mini_batch_size": update.mini_batch_size,
        "epochs": update.epochs,
        "micro_batch_size": update.train_micro_batch_size_per_gpu,
        "max_tokens_per_micro_batch": update.max_tokens_per_micro_batch,
        "strategy": update.strategy,
    }


def _part(part: RewardPart) -> dict[str, Any]:
    (origin,) = part.given()
    if origin == "name":
        return {"source": part.name, **({} if part.answer == "whole" else {"answer": part.answer})}
    return {"source": getattr(part, origin), **({} if part.template is None else {"template": part.template})}


def _load(config: Config, source: Any, actor: Actor) -> tuple[PromptDataset | PromptStream, list[str]]:
    data = config.data
    prompts = load_prompts(
        source,
        prompt_column=data.prompt_column,
        template=data.prompt_template,
        system_prompt=data.system_prompt,
        chat=data.chat,
    )
    limit = _prompt_limit(config, actor)
    tokens, counts = tokenize_prompts(
        prompts, actor.tokenizer, max_prompt_length=limit, truncation=data.truncation, tools=actor.tools
    )
    notes = [f"{counts[what]} prompts of {prompts.name} are longer than {limit} tokens and were {what}"
             for what in ("dropped", "truncated") if counts[what]]  # fmt: skip
    return tokens, notes


def _positions(actor: Actor) -> int:
    """The longest sequence the model takes; without bound where it states none."""
    return getattr(actor.model.config.get_text_config(), "max_position_embeddings", None) or 2**31


def _prompt_limit(config: Config, actor: Actor) -> int:
    # One position is left for a response at least.
    return min(config.data.max_prompt_length or 2**31, _positions(actor) - 1)


def _file(source: Any) -> str | None:
    """The file that a source names, if it names one and nothing else."""
    if isinstance(source, dict):
        return source["path"] if list(source) == ["path"] else None
    return source  # type: ignore[no-any-return]


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


def _tokenize(config: Config, loader: OfflineDatasetLoader, actor: Actor, split: str) -> list[str]:
    """Tokenise recorded rows; returns what became of the long ones, in words."""
    loader.max_prompt_length = _prompt_limit(config, actor)
    loader.tokenize(actor.tokenizer)
    lengths = (loader.batch.lengths(name) for name in ("prompt_tokens", "response_tokens"))
    longest = max(map(sum, zip(*lengths, strict=True)))
    if longest > _positions(actor):
        raise DataError(
            f"data.{split} has a row of {longest} tokens and the model takes {_positions(actor)}: set "
            "data.max_response_length, or data.max_prompt_length with data.truncation"
        )
    return [f"{count} rows of data.{split}: {what}" for what, count in loader.counts.items() if count]
