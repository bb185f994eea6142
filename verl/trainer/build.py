"""From a run's settings to its parts: actor, critic, reward, data, trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from verl import device
from verl.algorithms import BaseAlgorithm
from verl.batch import Batch
from verl.config import Config, CostConfig, RewardConfig
from verl.controller.controller import Controller
from verl.controller.placement import ROLES
from verl.controller.ranks import local_ranks
from verl.data.loader import PromptLoader
from verl.data.offline import OfflineDatasetLoader
from verl.data.prefetch import Loader, Prefetch
from verl.data.prompts import PromptDataset, check_disjoint
from verl.data.tokenize import tokenize_prompts
from verl.errors import DataError
from verl.models.loading import load_model
from verl.models.memory import ModelSize, estimate_memory, preflight
from verl.roles.actor import Actor
from verl.roles.critic import Critic
from verl.roles.reward import Reward
from verl.trainer.asynchronous import AsyncTrainer
from verl.trainer.check import Checked, source_options
from verl.trainer.logging import Logger
from verl.trainer.trainer import Trainer
from verl.training.options import TrainOptions
from verl.workers.update import UpdatePlan

logger = logging.getLogger(__name__)


@dataclass
class RunData:
    """The data of a run: endless training batches, what is held out, and what was done to them, in words.

    `held_out` is problems to sample and score, or recorded rows whose loss is measured; None: no evaluation.
    """

    train: Loader
    held_out: PromptDataset | Batch | None
    notes: list[str]


def placed_roles(algorithm: BaseAlgorithm) -> list[str]:
    """The roles of an algorithm that a map of placement names."""
    generates = ["rollout"] if algorithm.online else []
    models = algorithm.roles - {"actor", "reward", "cost"}
    return ["actor", *generates, *(role for role in ROLES if role in models)]


def build_actor(config: Config, algorithm: BaseAlgorithm, rows: int, controller: Controller | None = None) -> Actor:
    """The model that is trained, loaded under the head that the algorithm asks for; its reference policy too where
    one is given. `rows` are those of a step."""
    policy = config.actor_rollout_ref
    actor = Actor(
        policy.model,
        train=_training(config, policy.actor, rows),
        rollout=policy.rollout,
        head=algorithm.head,
        placement=controller,
        seed=config.trainer.seed,
    )
    if policy.ref.path is not None or policy.ref.dtype is not None:
        name, dtype = policy.ref.path or policy.model.path, policy.ref.dtype or policy.model.dtype
        assert name is not None
        actor.make_reference(load_model(name, dtype=dtype, trust_remote_code=policy.model.trust_remote_code))
    return actor


def build_critic(config: Config, rows: int, controller: Controller | None = None) -> Critic:
    """The value model of the settings; the actor's own model where they name none."""
    model = config.critic.model
    if model.path is None:
        model = model.replace(path=config.actor_rollout_ref.model.path)
    elif model.tokenizer is None:
        model = model.replace(tokenizer=model.path)
    train = _training(config, config.critic.options(config.actor_rollout_ref.actor), rows)
    return Critic(model, train=train, placement=controller, seed=config.trainer.seed)


def build_source(given: CostConfig, called: RewardConfig) -> Reward | None:
    """The reward or cost of a section, or the weighted sum of several, called as `called` says; None where it names
    none."""
    if not given.is_given:
        return None
    names = ("timeout", "retries", "max_failure_rate", "workers", "max_workers")
    options: dict[str, Any] = {name: getattr(called, name) for name in names}
    options["default_reward"] = None if called.on_failure == "abstain" else called.on_failure
    if given.components:
        parts = {name: {**source_options(part), "weight": part.weight} for name, part in given.components.items()}
        return Reward(parts, **options)
    part = source_options(given)
    return Reward(part.pop("source"), **part, **options)


def build_data(config: Config, actor: Actor, checked: Checked) -> RunData:
    """Training and held-out data, tokenised; what is held out and has a prompt of the training data is left out.

    Raises:
        DataError: a prompt or a row is too long, or nothing is left; see `tokenize_prompts`.
    """
    if isinstance(checked.train, OfflineDatasetLoader):
        return _recorded_data(config, actor, checked.train, checked.held_out)
    train, notes = _tokenize_prompts(config, checked.train, actor)
    data = config.data
    loader = PromptLoader(train, data.batch_size, seed=config.trainer.seed, shuffle=data.shuffle or None)
    if not isinstance(checked.held_out, PromptDataset):
        return RunData(Prefetch(loader), None, notes)
    held_out, more = _tokenize_prompts(config, checked.held_out, actor)
    held_out, overlap = check_disjoint(train, held_out)
    if overlap:
        more.append(f"{overlap} held-out prompts occur in training and were left out")
    return RunData(Prefetch(loader), held_out, notes + more)


def _recorded_data(
    config: Config, actor: Actor, train: OfflineDatasetLoader, held_out: PromptDataset | OfflineDatasetLoader | None
) -> RunData:
    notes = _tokenize(config, train, actor, "train")
    if held_out is None:
        return RunData(Prefetch(train), None, notes)
    if isinstance(held_out, PromptDataset):
        held_out, more = _tokenize_prompts(config, held_out, actor)
    else:
        more = _tokenize(config, held_out, actor, "eval")
    rows = held_out.batch
    seen = set(map(tuple, train.batch["prompt_tokens"]))
    keep = [tuple(prompt) not in seen for prompt in rows["prompt_tokens"]]
    if not any(keep):
        raise DataError("all held-out prompts occur in training (data.train): give other data.eval")
    if not all(keep):
        more.append(f"{keep.count(False)} held-out rows have a prompt of the training data and were left out")
    rows = rows.filter(keep)
    problems = PromptDataset(rows, held_out.name) if isinstance(held_out, PromptDataset) else rows
    return RunData(Prefetch(train), problems, notes + more)


def check_memory(config: Config, algorithm: BaseAlgorithm, actor: Actor) -> None:
    """Refuse a run that will not fit in memory, before it starts.

    Raises:
        ConfigError: with what is needed, what there is, and the setting to change.
    """
    policy = config.actor_rollout_ref
    model, update, rollout = policy.model, policy.actor, policy.rollout
    size = ModelSize.from_model(actor.model)
    size = replace(size, fused=size.fused and model.use_fused_kernels)
    layout = actor.controller.meshes("actor", update).meshes["train"].layout
    estimate = preflight(
        size,
        key="actor_rollout_ref.actor",
        max_tokens_per_micro_batch=update.max_tokens_per_micro_batch or 16384,
        kv_tokens=int((rollout.kv_cache_gb or 0.0) * 2**30 / max(size.kv_bytes_per_token, 1)),
        gradient_checkpointing=model.enable_gradient_checkpointing,
        moments=update.optim.moments,
        cut_over=layout.shard * layout.tp * layout.pp,
        available=_available(actor, size) - _others(algorithm, size),
    )
    logger.info("memory of training the actor: about %s", estimate)


def build_trainer(
    config: Config, algorithm: BaseAlgorithm, actor: Actor, rows: int, logger: Logger, **options: Any
) -> Trainer:
    """The trainer over all of it; `options` are further ones of `Trainer`."""
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
        build_source(config.reward, config.reward),
        cost=build_source(config.cost, config.reward),
        algorithm=algorithm,
        n=rollout.n,
        max_resamples=settings.max_resamples,
        max_skipped_updates=settings.max_skipped_updates,
        max_failed_episodes=config.reward.max_failure_rate,
        permute_rewards=settings.control == "permute_rewards",
        deadline=settings.deadline,
        async_save=settings.async_save,
        logger=logger,
        **options,
    )


def _available(actor: Actor, size: ModelSize) -> int:
    """Bytes free for the actor beside its weights, where it will run: of that device, or this rank's share of the
    host."""
    where = actor.controller.device
    if where == "cpu":
        return device.free_memory() // local_ranks()
    loaded = device.of(actor.model).startswith(where)
    return device.free_memory(where) - (0 if loaded else size.weight_bytes)


def _others(algorithm: BaseAlgorithm, size: ModelSize) -> int:
    """Bytes of the models beside the actor, taken to be of its size."""
    own = "reference" in algorithm.roles and size.trained == size.parameters  # that of a LoRA is its own base
    reference = estimate_memory(size, trained=False).total if own else 0
    critics = len(algorithm.roles & {"critic", "cost_critic"})
    return reference + critics * estimate_memory(size).total


def _training(config: Config, update: TrainOptions, rows: int) -> TrainOptions:
    """The section, with what the run decides: its length, and a control's learning rate."""
    optim = update.optim
    if config.trainer.control == "zero_lr":
        optim = optim.replace(lr=0.0)
    if optim.total_steps is None and optim.schedule != "constant":
        updates = UpdatePlan(update.mini_batch_size, update.epochs).updates(rows)
        optim = optim.replace(total_steps=max(1, config.trainer.total_steps * updates))
    return update.replace(optim=optim)


def _tokenize_prompts(config: Config, prompts: PromptDataset, actor: Actor) -> tuple[PromptDataset, list[str]]:
    """Tokenise prompts; with what became of the long ones, in words."""
    limit = _prompt_limit(config, actor)
    tokens, counts = tokenize_prompts(
        prompts, actor.tokenizer, max_prompt_length=limit, truncation=config.data.truncation, tools=actor.tools
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
    prompt = "prompts longer than data.max_prompt_length or what the model takes"
    what_became = {
        "dropped": f"{prompt}: their groups were dropped",
        "truncated": f"{prompt}, which were truncated",
        "responses_truncated": "responses longer than data.max_response_length, which lost their end",
    }
    counts = loader.counts
    return [f"{counts[what]} rows of data.{split} have {fate}" for what, fate in what_became.items() if counts[what]]
