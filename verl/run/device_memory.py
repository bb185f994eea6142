"""What a run takes of the memory of devices that are named, which need not be here."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from verl.algorithms import BaseAlgorithm
from verl.cluster.placement import DeviceMesh
from verl.config import Config
from verl.errors import ConfigError
from verl.models.loading import configured_model
from verl.models.lora import add_lora
from verl.models.memory import MemoryEstimate, ModelSize, estimate_memory
from verl.models.options import ModelOptions
from verl.rollout.choice import planned_engine
from verl.run.check import roles_of
from verl.run.memory import actor_memory
from verl.training.options import OptimConfig, TrainOptions, layout_of

if TYPE_CHECKING:
    from verl.planner.hardware import Cluster


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
    from verl.planner.memory import RESERVE

    policy = config.actor_rollout_ref
    cut = _cut_over(config, "actor", policy.actor, cluster)
    size = _size(policy.model)
    reserve = int(RESERVE * cluster.device.memory)
    others = dict(_beside(config, algorithms, size, cluster))
    room = int(cluster.device.memory) - reserve - sum(part.total for part in others.values())
    actor = actor_memory(config, size, cut, room - size.weight_bytes, cluster.device.head)
    cache, actor = actor.kv_cache, actor._replace(kv_cache=0)
    if cut > 1:  # the copy that generates is cut as its engine is
        actor = actor._replace(weights=actor.weights // policy.rollout.tensor_model_parallel_size)
    if policy.actor.fsdp_config.param_offload and cut > 1:
        actor = actor._replace(masters=0, moments=0, gradients=0)
    rollout = policy.rollout
    if not any(algorithm.online for algorithm in algorithms) or _is_apart(config, "rollout"):
        cache = 0
    elif rollout.kv_cache_gb is None:
        length = (config.data.max_prompt_length or 1024) + rollout.max_new_tokens
        wanted = 2 * rollout.max_num_seqs * length * size.kv_bytes_per_token // rollout.tensor_model_parallel_size
        cache = min(wanted, max(0, room - actor.total) // 2)
    return DeviceMemory(cluster, {"actor": actor, **others}, cache, reserve)


def _beside(
    config: Config, algorithms: Collection[BaseAlgorithm], actor: ModelSize, cluster: Cluster
) -> Iterator[tuple[str, MemoryEstimate]]:
    """The models on the actor's devices."""
    policy = config.actor_rollout_ref
    roles = roles_of(config, algorithms)
    if "reference" in roles and not _is_apart(config, "reference") and policy.model.lora is None:
        path = policy.ref.path or policy.model.path
        model = ModelOptions(path=path, dtype=policy.ref.dtype or policy.model.dtype)
        cut = _cut_over(config, "reference", policy.actor, cluster)
        yield "reference", MemoryEstimate(_size(model).weight_bytes // cut)
    for role in sorted(roles & {"critic", "cost_critic"}):
        if not _is_apart(config, role):
            train = config.critic.options(policy.actor)
            model = config.critic.model.replace(path=config.critic.model.path or policy.model.path)
            cut = _cut_over(config, role, train, cluster)
            estimate = estimate_memory(_size(model, "score"), moments=train.optim.moments, cut_over=cut)
            # Of one that is cut none is whole: a critic generates nothing.
            yield role, estimate._replace(weights=0) if cut > 1 else estimate
    for role in ("reward", "cost"):
        section = getattr(config, role)
        for part in section.components.values() or [section]:
            if part.model is not None and not _is_apart(config, role):
                scored = _size(ModelOptions(path=part.model, dtype=part.dtype), "score")
                yield f"{role} model", estimate_memory(scored, trained=False)
    online = any(algorithm.online for algorithm in algorithms)
    copies = (
        online
        and not policy.rollout.url
        and planned_engine(policy.rollout, policy.model).name == "vllm"
        and not _is_apart(config, "rollout")
    )
    # An actor that is cut counts a whole copy for generation, which is vLLM's then.
    if copies and _cut_over(config, "actor", policy.actor, cluster) == 1:
        yield "vLLM", MemoryEstimate(actor.weight_bytes // policy.rollout.tensor_model_parallel_size)


def _size(model: ModelOptions, kind: Literal["causal", "score"] = "causal") -> ModelSize:
    if model.dtype == "int4":
        raise ConfigError("--device: the memory of weights in int4 is not modelled: try it with model.dtype=bfloat16")
    trust = model.trust_remote_code
    configured = configured_model(str(model.path), dtype=model.dtype, kind=kind, trust_remote_code=trust)
    if model.lora is not None:
        add_lora(configured, model.lora)
    return ModelSize.from_model(configured)._replace(fused=False)


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
