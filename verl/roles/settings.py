"""The keywords of a handle (`Actor(lr...)`, `Critic(...)`): each is a field of one of its records."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from verl._base.combinations import check, named
from verl._base.keywords import takes
from verl._base.record import Record, SettingsError
from verl.errors import ConfigError, nearest
from verl.models.lora import has_adapters
from verl.models.options import ModelOptions
from verl.rollout.choice import choose_engine
from verl.rollout.options import RolloutOptions, SamplerOptions
from verl.training.options import EngineOptions, OptimConfig, TrainOptions
from verl.workers.actor import load_episode

logger = logging.getLogger(__name__)

#: Keyword -> field, where a handle's name for a setting differs from the file's.
KEYWORDS = {
    "rollout_per_device_batch_size": "max_num_seqs",
    "gradient_checkpointing": "enable_gradient_checkpointing",
    "tensor_parallel_size": "tensor_model_parallel_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
}


#: Fields of records that are no keywords of a handle: it has arguments for them, or a file alone says them.
OF_FILES = frozenset((
    "path", "tokenizer", "name", "url", "n", "episode", "optim", "strategy", "num_rollout_workers",
    "max_rollout_workers", "transport",
))  # fmt: skip


_RECORDS: tuple[type[Record], ...] = (ModelOptions, TrainOptions, OptimConfig, RolloutOptions)
#: The keywords of `Actor` that are fields of its records.
ACTOR_KEYWORDS = {*KEYWORDS}.union(*(record.model_fields for record in _RECORDS)) - OF_FILES


def with_keywords(owner: str, keywords: Mapping[str, Any], *records: Record) -> list[Any]:
    """The records, with each keyword put into the one that has a field of its name.

    Raises:
        ConfigError: no record has such a field, or refuses the value.
    """
    if not keywords:
        return [*records]
    changes: list[dict[str, Any]] = [{} for _ in records]
    known = [type(record).model_fields.keys() - OF_FILES for record in records]
    for keyword, value in keywords.items():
        spelt = (KEYWORDS.get(keyword, keyword), keyword)
        index, name = next(((i, name) for name in spelt for i, names in enumerate(known) if name in names), (None, ""))
        if index is None:
            every = {"model", "tokenizer", "optim", "strategy", *KEYWORDS, *OptimConfig.model_fields}.union(*known)
            raise ConfigError(f"{owner} has no setting '{keyword}': {takes(keyword) or nearest(keyword, every)}")
        changes[index][name] = value
    try:
        return [record.replace(**change) if change else record for record, change in zip(records, changes, strict=True)]
    except SettingsError as error:
        raise SettingsError(owner, error.problems) from None


def read_settings(
    owner: str,
    keywords: Mapping[str, Any],
    model: Any,
    train: TrainOptions | Mapping[str, Any] | None,
    optim: Any,
    strategy: Any,
    fused_kernels: bool | str | None,
    *more: Record,
) -> tuple[EngineOptions, list[Any]]:
    """The options of a training engine, and the records of the model, of training, and `more`, with the keywords.

    Args:
        model: a name, `ModelOptions`, or a live model, whose settings are the defaults.
        optim: an `OptimConfig`, a mapping of its fields, or a caller's optimizer or a function that makes one.

    Raises:
        ConfigError: a keyword is unknown, or refused by its record; the optimizer's own fields, such as `lr`, come with
            a caller's own optimizer, or one is given twice.
    """
    options, rest = TrainOptions.of(train, "train"), dict(keywords)
    of_optimizer = {name: rest.pop(name) for name in OptimConfig.model_fields if name in rest}
    is_own = isinstance(optim, torch.optim.Optimizer) or callable(optim)
    if of_optimizer and is_own:
        first = next(iter(of_optimizer))
        raise ConfigError(f"{owner}: '{first}' is set in the optimizer that you gave: leave it out here")
    if isinstance(optim, Mapping) and (twice := of_optimizer.keys() & optim.keys()):
        raise ConfigError(f"{owner}: '{min(twice)}' is given as a keyword and in optim=: give it once")
    loading = model if isinstance(model, ModelOptions) else ModelOptions(path=model if isinstance(model, str) else None)
    if fused_kernels is not None:
        backend = fused_kernels if isinstance(fused_kernels, str) else None
        use = fused_kernels if backend is None else True
        loading = loading.replace(use_fused_kernels=use, fused_kernel_options={"impl_backend": backend})
    loading, training, *others = with_keywords(owner, rest, loading, options, *more)
    training = training if strategy is None else training.replace(strategy=strategy)
    settings: dict[str, Any] = {name: getattr(training, name) for name in TrainOptions.model_fields}
    if is_own:
        settings |= {"optim": None, "optimizer": optim}
    elif optim is not None or of_optimizer:
        config = training.optim if optim is None else OptimConfig.of(optim, "optim")
        settings["optim"] = config.replace(**of_optimizer)
    engine = EngineOptions(
        **settings,
        gradient_checkpointing=loading.enable_gradient_checkpointing,
        fused_kernels=loading.fused_kernels,
        remove_padding=loading.use_remove_padding,
    )
    return engine, [loading, training, *others]


def as_name(model: Any) -> Any:
    """A `Path` as text; anything else as it is."""
    return os.fspath(model) if isinstance(model, os.PathLike) else model


def sampler_options(rollout: Any, episode: Any, seed: int) -> SamplerOptions:
    """The options of the actor's rollout engine; `rollout` is a section, or an engine's name or factory."""
    if not isinstance(rollout, RolloutOptions):
        return SamplerOptions(name=rollout, episode=episode, seed=seed)
    settings: dict[str, Any] = {name: getattr(rollout, name) for name in RolloutOptions.model_fields}
    if rollout.url:
        from verl.roles.servers import vLLMWorker

        settings |= {"name": vLLMWorker(rollout.url), "url": ()}
    played = episode or rollout.environment or rollout.episode
    return SamplerOptions(**settings | {"episode": played, "environment": None, "seed": seed})


def with_engine(options: SamplerOptions, model: Any, device: str) -> SamplerOptions:
    """Replace engine "auto" by the one chosen for the model and device, and log it.

    Raises:
        ConfigError: an option is not supported on the device.
    """
    check(options.asked() | named({"accelerator": not device.startswith("cpu") and device}))
    if options.name != "auto":
        return options
    name, why = choose_engine(
        options,
        device,
        dtype=str(next(iter(model.parameters())).dtype).removeprefix("torch."),
        adapters=has_adapters(model),
        episodes=map(load_episode, (options.episode, *options.episodes.values())),
    )
    on_gpu = device.startswith("cuda")  # elsewhere there is nothing to choose
    logger.log(logging.INFO if on_gpu else logging.DEBUG, "rollout.name=auto: %s, because %s", name, why)
    return options.replace(name=name)
