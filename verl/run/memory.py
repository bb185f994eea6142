"""Whether a run fits in memory, before it starts: of this machine, or of named devices that need not be here."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

from verl._host import device
from verl._host.ranks import local_ranks
from verl.algorithms import BaseAlgorithm
from verl.cluster.placement import DeviceMesh
from verl.config import Config
from verl.errors import ConfigError
from verl.models.head_sizes import HeadSizes
from verl.models.memory import MemoryEstimate, ModelSize, estimate_memory
from verl.models.options import ModelOptions
from verl.planner.hardware import Cluster
from verl.planner.memory import RESERVE
from verl.roles.actor import Actor
from verl.rollout.choice import planned_engine
from verl.run.check import roles_of
from verl.run.planned import model_size, reference_model, reward_models
from verl.training.options import OptimConfig, TrainOptions, layout_of

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
    available, algorithms = _available(actor, size), list(algorithms)
    # The models beside the actor are taken to be of its size. The reference of a LoRA is its own base.
    if size.trained == size.parameters and "reference" in roles_of(config, algorithms):
        available -= size.weight_bytes
    critics = sum(len(algorithm.roles & {"critic", "cost_critic"}) for algorithm in algorithms)  # each task has its own
    available -= critics * estimate_memory(size).total
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
    moments = policy.actor.optim.moments
    need = partial(estimate_memory, size, kv_tokens=kv_tokens, moments=moments, cut_over=cut_over, head=head)
    estimate = need(micro_batch_tokens=most, gradient_checkpointing=saves)
    have = available + estimate.weights
    if estimate.total <= have:
        return estimate
    missing = f"{key}.actor: training needs {estimate}, and {have / 1e9:.2f} GB are there"
    halves = [most]
    while halves[-1] > 256:
        halves.append(halves[-1] // 2)
    for checkpointing, tokens in product(dict.fromkeys((saves, True)), halves):
        if need(micro_batch_tokens=tokens, gradient_checkpointing=checkpointing).total <= have:
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


@dataclass(frozen=True)
class DeviceMemory:
    """What a run takes of each device that the actor trains on, in bytes.

    Attributes:
        parts: name -> what it takes there; they are counted as if all were there at once.
        kv_cache: room for keys and values: as the settings say, else as the engine takes it.
        reserve: what the device's runtime, communication and fragmentation take.
    """

    cluster: Cluster
    parts: dict[str, MemoryEstimate]
    kv_cache: int
    reserve: int

    @property
    def total(self) -> int:
        return sum(part.total for part in self.parts.values()) + self.kv_cache + self.reserve

    def lines(self) -> Iterator[str]:
        """A table in GB, and whether it fits."""
        have = self.cluster.device.memory
        yield f"{self.cluster}, {have / 1e9:g} GB each; of one that the actor trains on, GB"
        for name, part in self.parts.items():
            amounts = ", ".join(f"{what} {bytes_ / 1e9:.1f}" for what, bytes_ in part._asdict().items() if bytes_)
            yield f"{name:<14} {part.total / 1e9:6.1f}  {amounts}"
        yield f"{'KV cache':<14} {self.kv_cache / 1e9:6.1f}"
        yield f"{'reserve':<14} {self.reserve / 1e9:6.1f}  runtime, communication, fragmentation"
        yield f"{'sum':<14} {self.total / 1e9:6.1f}  of {have / 1e9:.1f}: {'fits' if self.total <= have else 'no room'}"


def memory_on(config: Config, algorithms: Collection[BaseAlgorithm], cluster: Cluster) -> DeviceMemory:
    """What a run takes of devices that need not be here. Models are made of their configurations, without weights.

    Models that a placement puts on other devices than the actor's are not counted; models on the same ones are,
    each laid out over all of its ranks.

    Raises:
        ConfigError: the actor does not fit beside the others (with the setting to change), or a model is not
            modelled.
        ModelError: a model's configuration cannot be found.
    """
    policy, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    cut = _cut_over(config, "actor", policy.actor, cluster)
    size = model_size(policy.model)
    reserve = int(RESERVE * cluster.device.memory)
    others = dict(_beside(config, algorithms, cluster))
    generates = any(algorithm.online for algorithm in algorithms) and not _is_apart(config, "rollout")
    # An actor that is cut counts a whole copy for generation, which is vLLM's then.
    if generates and cut == 1 and not rollout.url and planned_engine(rollout, policy.model).name == "vllm":
        others["vLLM"] = MemoryEstimate(size.weight_bytes // rollout.tensor_model_parallel_size)
    room = int(cluster.device.memory) - reserve - sum(part.total for part in others.values())
    actor = actor_memory(config, size, cut, room - size.weight_bytes, cluster.device.head)
    cache, actor = actor.kv_cache, actor._replace(kv_cache=0)
    if cut > 1:  # the copy that generates is cut as its engine is
        actor = actor._replace(weights=actor.weights // rollout.tensor_model_parallel_size)
    if policy.actor.fsdp_config.param_offload and cut > 1:
        actor = actor._replace(masters=0, moments=0, gradients=0)
    if not generates:
        cache = 0
    elif rollout.kv_cache_gb is None:
        length = (config.data.max_prompt_length or 1024) + rollout.max_new_tokens
        wanted = 2 * rollout.max_num_seqs * length * size.kv_bytes_per_token // rollout.tensor_model_parallel_size
        cache = min(wanted, max(0, room - actor.total) // 2)
    return DeviceMemory(cluster, {"actor": actor, **others}, cache, reserve)


def _beside(
    config: Config, algorithms: Collection[BaseAlgorithm], cluster: Cluster
) -> Iterator[tuple[str, MemoryEstimate]]:
    """The further models on the actor's devices."""
    policy = config.actor_rollout_ref
    roles = roles_of(config, algorithms)
    if "reference" in roles and not _is_apart(config, "reference") and policy.model.lora is None:
        cut = _cut_over(config, "reference", policy.actor, cluster)
        yield "reference", MemoryEstimate(model_size(reference_model(policy)).weight_bytes // cut)
    for role in sorted(roles & {"critic", "cost_critic"}):
        if not _is_apart(config, role):
            train = config.critic.options(policy.actor)
            model = config.critic.model.replace(path=config.critic.model.path or policy.model.path)
            cut = _cut_over(config, role, train, cluster)
            estimate = estimate_memory(model_size(model, "score"), moments=train.optim.moments, cut_over=cut)
            # Of one that is cut none is whole: a critic generates nothing.
            yield role, estimate._replace(weights=0) if cut > 1 else estimate
    for role, part in reward_models(config):
        if not _is_apart(config, role):
            scored = model_size(ModelOptions(path=part.model, dtype=part.dtype), "score")
            yield f"{role} model", estimate_memory(scored, trained=False)


def _is_apart(config: Config, role: str) -> bool:
    """Whether a role stands on none of the devices of the actor."""
    if config.trainer.placement is None:
        return False
    mesh = DeviceMesh(config.trainer.placement)
    return not set(mesh.pool(role).devices) & set(mesh.pool("actor").devices)


def _cut_over(config: Config, role: str, train: TrainOptions, cluster: Cluster) -> int:
    """Ranks that each keep a part of a role's training state."""
    count, parallel = cluster.size, "data"
    if config.trainer.placement is not None:
        pool = DeviceMesh(config.trainer.placement).pool(role)
        count, parallel = len(pool.devices), pool.parallel
        if count > cluster.size:
            raise ConfigError(f"--device: trainer.placement has {role} on {count} devices, and {cluster} are given")
    layout = layout_of(train.replace(optim=OptimConfig()), count, parallel)  # a schedule's end is not known yet
    return layout.shard * layout.tp * layout.pp
