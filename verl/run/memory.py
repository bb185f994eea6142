"""Whether a run fits in memory, before it starts: of this machine, or of named devices that need not be here."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product

from verl._host import device
from verl._host.ranks import local_ranks
from verl.algorithms import BaseAlgorithm
from verl.cluster.placement import DeviceMesh
from verl.config import Config
from verl.errors import ConfigError
from verl.models.memory import HeadSizes, ModelSize
from verl.planner.hardware import Cluster
from verl.planner.memory import RESERVE, Strategy, Usage, ddp, estimate, fsdp
from verl.roles.actor import Actor
from verl.rollout.choice import planned_engine
from verl.run.build import roles_of
from verl.run.planned import model_sizes
from verl.training.options import OptimConfig, TrainOptions, layout_of
from verl.weights.layout import Layout

logger = logging.getLogger(__name__)
#: Tokens of a micro-batch where `max_tokens_per_micro_batch` does not say.
_MICRO_BATCH = 16384


def check_memory(config: Config, algorithms: Collection[BaseAlgorithm], actor: Actor) -> None:
    """Refuse a run of these algorithms that will not fit in memory, before it starts.

    Raises:
        ConfigError: names the bytes that are missing, and the setting to change.
    """
    policy = config.actor_rollout_ref
    size = ModelSize.from_model(actor.modules)
    size = size._replace(fused=size.fused and policy.model.use_fused_kernels)
    where = actor.controller.device
    if not device.is_here(where):
        logger.info("memory is not checked: this process sees no '%s'", where)
        return
    layout = actor.controller.meshes("actor", actor.train_options)["train"].layout
    available = device.free_memory(where)
    if where == "cpu":
        available //= local_ranks()
    elif not device.of(actor.modules).startswith(where):
        available -= size.weight_bytes
    # The models beside the actor are taken to be of its size. The reference of a LoRA is its own base.
    if size.trained == size.parameters and "reference" in roles_of(config, algorithms):
        available -= size.weight_bytes
    critics = sum(len(algorithm.roles & {"critic", "cost_critic"}) for algorithm in algorithms)  # each task has its own
    available -= critics * int(estimate(size, ddp(size.itemsize), Layout()).resting)
    usage = actor_memory(config, size, layout, available, HeadSizes.on(where))
    logger.info("memory of training the actor: about %s", usage)


def actor_memory(config: Config, size: ModelSize, layout: Layout, available: int, head: HeadSizes) -> Usage:
    """The memory of training the actor at its peak, with its weights for generation and its KV cache.

    Args:
        layout, head: as of `estimate`.
        available: bytes that are free where it is trained, its weights being there already.

    Raises:
        ConfigError: it does not fit; the message says how much is missing and which setting makes it fit.
    """
    policy, key = config.actor_rollout_ref, "actor_rollout_ref"
    most, saves = policy.actor.max_tokens_per_micro_batch or _MICRO_BATCH, policy.model.enable_gradient_checkpointing
    strategy = _strategy(policy.actor, size, layout)

    def need(tokens: int, checkpointing: bool) -> Usage:
        usage = estimate(size, strategy, layout, tokens, checkpointing=checkpointing, head=head)
        # Where training does not gather, its shards are slices of the generation weights, and are not held twice.
        held = 0.0 if strategy.gathers else usage.kept["weights"]
        generation = max(0.0, size.weight_bytes / policy.rollout.tensor_model_parallel_size - held)
        cache = (policy.rollout.kv_cache_gb or 0.0) * 2**30
        return replace(usage, kept={**usage.kept, "generation": generation, "KV cache": cache})

    usage, have = need(most, saves), available + size.weight_bytes
    if usage.peak <= have:
        return usage
    missing = f"{key}.actor: training needs {usage}, and {have / 1e9:.2f} GB are there"
    halves = [most]
    while halves[-1] > 256:
        halves.append(halves[-1] // 2)
    for checkpointing, tokens in product(dict.fromkeys((saves, True)), halves):
        if need(tokens, checkpointing).peak <= have:
            settings = [f"{key}.actor.max_tokens_per_micro_batch={tokens} (now {most})"]
            if checkpointing != saves:
                settings.append(f"{key}.model.enable_gradient_checkpointing=true")
            raise ConfigError(f"{missing}: set {' and '.join(settings)}")
    raise ConfigError(f"{missing}: no micro-batch is small enough, take a smaller model or a machine with more memory")


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a run on each device that the actor trains on, in bytes.

    Attributes:
        parts: model -> its memory; counted as if all were there at once.
        kv_cache: room for keys and values: as the settings say, else as the engine takes it.
        reserve: what the device's runtime, communication and fragmentation take.
    """

    cluster: Cluster
    parts: dict[str, Usage]
    kv_cache: float
    reserve: float

    @property
    def total(self) -> float:
        return sum(part.peak for part in self.parts.values()) + self.kv_cache + self.reserve

    def lines(self) -> Iterator[str]:
        """A table in GB, and whether it fits."""
        have = self.cluster.device.memory
        yield f"{self.cluster}, {have / 1e9:g} GB each; of one that the actor trains on, GB"
        for name, part in self.parts.items():
            amounts = ((what, f"{amount / 1e9:.1f}") for what, amount in {**part.kept, **part.step}.items())
            shown = ", ".join(f"{what} {amount}" for what, amount in amounts if float(amount))
            yield f"{name:<14} {part.peak / 1e9:6.1f}  {shown}"
        yield f"{'KV cache':<14} {self.kv_cache / 1e9:6.1f}"
        yield f"{'reserve':<14} {self.reserve / 1e9:6.1f}  runtime, communication, fragmentation"
        yield f"{'sum':<14} {self.total / 1e9:6.1f}  of {have / 1e9:.1f}: {'fits' if self.total <= have else 'no room'}"


def memory_on(config: Config, algorithms: Collection[BaseAlgorithm], cluster: Cluster) -> DeviceMemory:
    """The memory of a run on devices that need not be here. Models are made of their configurations, without weights.

    Models that a placement puts on other devices than the actor's are not counted; models on the same ones are,
    each laid out over all of its ranks.

    Raises:
        ConfigError: the actor does not fit together with the other models (names the setting to change), or a model
            is not modelled.
        ModelError: a model's configuration cannot be found.
    """
    policy, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    roles = roles_of(config, algorithms) | {"reward", "cost"}
    roles = {role for role in roles if not _is_apart(config, role)}
    if policy.model.lora is not None:  # the reference is the actor's own base
        roles.discard("reference")
    (_, size), *sizes = model_sizes(config, roles)
    layout = _layout(config, "actor", policy.actor, cluster)
    reserve = RESERVE * cluster.device.memory
    others: dict[str, Usage] = {}
    for role, other in sizes:
        if role in ("reward", "cost"):
            others[f"{role} model"] = Usage({"weights": other.weight_bytes})
            continue
        train = policy.actor if role == "reference" else config.critic.options(policy.actor)
        where = _layout(config, role, train, cluster)
        usage = estimate(other, _strategy(train, other, where), where, trained=role != "reference")
        others[role] = replace(usage, step={})
    generates = any(algorithm.online for algorithm in algorithms) and not _is_apart(config, "rollout")
    # An actor whose ranks share it has other weights for generation, which are vLLM's then.
    whole = layout.shard * layout.tp * layout.pp == 1
    if generates and whole and not rollout.url and planned_engine(rollout, policy.model).name == "vllm":
        others["vLLM"] = Usage({"weights": size.weight_bytes / rollout.tensor_model_parallel_size})
    room = cluster.device.memory - reserve - sum(part.peak for part in others.values())
    actor = actor_memory(config, size, layout, int(room) - size.weight_bytes, cluster.device.head)
    cache = actor.kept.pop("KV cache")
    if not generates:
        cache = actor.kept["generation"] = 0.0
    elif rollout.kv_cache_gb is None:
        length = (config.data.max_prompt_length or 1024) + rollout.max_new_tokens
        wanted = 2 * rollout.max_num_seqs * length * size.kv_bytes_per_token() // rollout.tensor_model_parallel_size
        cache = min(wanted, max(0.0, room - actor.peak) / 2)
    return DeviceMemory(cluster, {"actor": actor, **others}, cache, reserve)


def _is_apart(config: Config, role: str) -> bool:
    """Whether a role shares no device with the actor."""
    if config.trainer.placement is None:
        return False
    mesh = DeviceMesh(config.trainer.placement)
    return not set(mesh.pool(role).devices) & set(mesh.pool("actor").devices)


def _layout(config: Config, role: str, train: TrainOptions, cluster: Cluster) -> Layout:
    """The training layout of a role on the devices that it has."""
    count, parallel = cluster.size, "data"
    if config.trainer.placement is not None:
        pool = DeviceMesh(config.trainer.placement).pool(role)
        count, parallel = len(pool.devices), pool.parallel
        if count > cluster.size:
            raise ConfigError(f"--device: trainer.placement has {role} on {count} devices, and {cluster} are given")
    return layout_of(train.replace(optim=OptimConfig()), count, parallel)  # a schedule's end is not known yet


def _strategy(train: TrainOptions, size: ModelSize, layout: Layout) -> Strategy:
    # What a layer gathers for a moment is part of the reserve.
    if layout.shard > 1:
        return replace(fsdp(size.itemsize, offloaded=train.fsdp_config.param_offload), wire=(0.0, 0.0))
    return ddp(size.itemsize, train.optim.moments == "float32")
