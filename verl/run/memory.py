"""Whether a run fits in the memory of this machine, before it starts. See `device_memory` for others."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from verl import device
from verl.algorithms import BaseAlgorithm
from verl.config import Config
from verl.errors import ConfigError
from verl.models.head_sizes import HeadSizes
from verl.models.memory import MemoryEstimate, ModelSize, estimate_memory
from verl.ranks import local_ranks
from verl.roles.actor import Actor
from verl.run.check import roles_of

logger = logging.getLogger(__name__)
#: Tokens of a micro-batch where `max_tokens_per_micro_batch` does not say.
_MICRO_BATCH = 16384


def check_memory(config: Config, algorithms: Iterable[BaseAlgorithm], actor: Actor) -> None:
    """Refuse a run of these algorithms that will not fit in memory, before it starts.

    Raises:
        ConfigError: with what is needed, what there is, and the setting to change.
    """
    policy = config.actor_rollout_ref
    size = ModelSize.from_model(actor.modules)
    size = size._replace(fused=size.fused and policy.model.use_fused_kernels)
    if not device.is_here(actor.controller.device):
        logger.info("memory is not checked: this process sees no '%s'", actor.controller.device)
        return
    layout = actor.controller.meshes("actor", actor.train_options)["train"].layout
    available = _available(actor, size) - _others(config, list(algorithms), size)
    head = HeadSizes.on(actor.controller.device)
    estimate = actor_memory(config, size, layout.shard * layout.tp * layout.pp, available, head)
    logger.info("memory of training the actor: about %s", estimate)


def actor_memory(config: Config, size: ModelSize, cut_over: int, available: int, head: HeadSizes) -> MemoryEstimate:
    """What training the actor takes at its peak.

    Args:
        cut_over, head: as of `estimate_memory`.
        available: bytes that are free where it is trained, its weights being there already.

    Raises:
        ConfigError: it does not fit; the message says how much is missing and which setting makes it fit.
    """
    policy, key = config.actor_rollout_ref, "actor_rollout_ref"
    most, saves = policy.actor.max_tokens_per_micro_batch or _MICRO_BATCH, policy.model.enable_gradient_checkpointing
    kv_tokens = int((policy.rollout.kv_cache_gb or 0.0) * 2**30 / max(size.kv_bytes_per_token, 1))

    def need(tokens: int, checkpointing: bool) -> MemoryEstimate:
        return estimate_memory(
            size,
            micro_batch_tokens=tokens,
            kv_tokens=kv_tokens,
            gradient_checkpointing=checkpointing,
            moments=policy.actor.optim.moments,
            cut_over=cut_over,
            head=head,
        )

    estimate = need(most, saves)
    have = available + estimate.weights
    if estimate.total <= have:
        return estimate
    missing = f"{key}.actor: training needs {estimate}, and {have / 1e9:.2f} GB are there"
    for checkpointing in dict.fromkeys((saves, True)):
        tokens = most
        while tokens > 256 and need(tokens, checkpointing).total > have:
            tokens //= 2
        if need(tokens, checkpointing).total <= have:
            settings = [f"{key}.actor.max_tokens_per_micro_batch={tokens} (now {most})"]
            if checkpointing != saves:
                settings.append(f"{key}.model.enable_gradient_checkpointing=true")
            raise ConfigError(f"{missing}: set {' and '.join(settings)}")
    raise ConfigError(f"{missing}: no micro-batch is small enough, take a smaller model or a machine with more memory")


def _available(actor: Actor, size: ModelSize) -> int:
    """Bytes free for the actor beside its weights, where it will run: of that device, or this rank's share of the
    host."""
    where = actor.controller.device
    if where == "cpu":
        return device.free_memory("cpu") // local_ranks()
    loaded = device.of(actor.modules).startswith(where)
    return device.free_memory(where) - (0 if loaded else size.weight_bytes)


def _others(config: Config, algorithms: Collection[BaseAlgorithm], size: ModelSize) -> int:
    """Bytes of the models beside the actor, taken to be of its size; each task has critics of its own."""
    is_whole = size.trained == size.parameters  # the reference of a LoRA is its own base
    needed = is_whole and "reference" in roles_of(config, algorithms)
    reference = estimate_memory(size, trained=False).total if needed else 0
    critics = sum(len(algorithm.roles & {"critic", "cost_critic"}) for algorithm in algorithms)
    return reference + critics * estimate_memory(size).total
