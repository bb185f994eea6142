"""From a run's settings to the planner's problem, and from its plan to settings that are ready to paste."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import ceil
from typing import Any, Literal

from omegaconf import OmegaConf

from verl.config import Config, RewardPart
from verl.errors import ConfigError
from verl.models.memory import ModelSize
from verl.models.options import ModelOptions
from verl.planner.cost import Workload
from verl.planner.hardware import Cluster
from verl.planner.memory import Strategy, ddp, fsdp
from verl.planner.search import Model, PlacementPlan, Problem
from verl.rollout.choice import planned_engine
from verl.training.options import DeepSpeedOptions, FSDPConfig, TrainOptions

#: Tokens of a prompt where data.max_prompt_length does not say.
PROMPT = 1024


def problem_of(config: Config, roles: Collection[str], cluster: Cluster, most_seconds: float = float("inf")) -> Problem:
    """The models of a run and their workload, to be placed on a cluster.

    Args:
        roles: of its algorithm.
        most_seconds: bound of a step's generation.

    Raises:
        ConfigError: a model's configuration cannot be read, or something of the run is not modelled.
    """
    policy = config.actor_rollout_ref
    if policy.model.lora is not None or config.trainer.max_staleness is not None or "actor" not in roles:
        raise ConfigError("verl plan: runs with LoRA or asynchronous training are not modelled: leave them out")
    if policy.rollout.name == "hf":
        raise ConfigError("verl plan: the engine 'hf' is not modelled: set rollout.name=embedded or vllm")
    sizes = [*model_sizes(config, {*roles, "reward", "cost"})]
    trained = _strategies("actor_rollout_ref.actor", policy.actor, sizes[0][1])
    models = [Model("actor", sizes[0][1], True, trained)]
    if critics := [(role, size) for role, size in sizes if role in ("critic", "cost_critic")]:
        (first, size), *copies = critics
        strategies = _strategies("critic", config.critic.options(policy.actor), size)
        models.append(Model(first, size, True, strategies, beside=tuple(role for role, _ in copies)))
    models += [Model(role, size, False, trained, follows="actor") for role, size in sizes if role == "reference"]
    # Models that score share their devices, and the largest stands for each of them.
    if scored := [(role, size) for role, size in sizes if role in ("reward", "cost")]:
        largest = max((size for _, size in scored), key=lambda size: size.parameters)
        first, *others = (role for role, _ in scored)
        models.append(Model(first, largest, False, (ddp(largest.itemsize),), whole=True, beside=tuple(others)))
    if any(model.size.experts for model in models):
        raise ConfigError("verl plan: mixtures of experts are not modelled")
    return Problem(tuple(models), _workload(config), cluster, most_seconds)


def model_sizes(config: Config, roles: Collection[str]) -> Iterator[tuple[str, ModelSize]]:
    """The models of these roles of a run, the actor first; several may score.

    Raises:
        ModelError, ConfigError: see `model_size`.
    """
    policy, critic = config.actor_rollout_ref, config.critic.model
    yield "actor", model_size(policy.model)
    for role in (role for role in ("critic", "cost_critic") if role in roles):
        yield role, model_size(critic.replace(path=critic.path or policy.model.path), "score")
    if "reference" in roles:
        path, dtype = policy.ref.path or policy.model.path, policy.ref.dtype or policy.model.dtype
        yield "reference", model_size(ModelOptions(path=path, dtype=dtype))
    for role, part in reward_models(config):
        if role in roles:
            yield role, model_size(ModelOptions(path=part.model, dtype=part.dtype), "score")


def _workload(config: Config) -> Workload:
    policy = config.actor_rollout_ref
    update, rollout = policy.actor, policy.rollout
    samples, prompt = config.data.batch_size * rollout.n, config.data.max_prompt_length or PROMPT
    length = prompt + rollout.max_new_tokens
    updates = update.epochs * ceil(samples / (update.mini_batch_size or samples))
    rows = samples if update.micro_batch_size is None else update.micro_batch_size
    return Workload(
        samples=samples,
        n=rollout.n,
        prompt=prompt,
        response=rollout.max_new_tokens,
        updates=updates,
        epochs=update.epochs,
        micro_batch=max(1, min(rows, (update.max_tokens_per_micro_batch or rows * length) // length)),
        checkpointing=policy.model.enable_gradient_checkpointing,
        max_num_seqs=rollout.max_num_seqs,
        # A single update on samples of the embedded engine takes them from its own forward pass.
        old_log_probs=updates > 1 or planned_engine(policy.rollout, policy.model).name != "embedded",
    )


def model_size(model: ModelOptions, kind: Literal["causal", "score"] = "causal") -> ModelSize:
    """The size of a model by its configuration, in a directory or on the hub; no weights are read.

    Raises:
        ModelError: there is no configuration, or it describes no model.
        ConfigError: its weights are in int4, which is not modelled; or see `add_lora`.
    """
    from verl.models.loading import configured_model
    from verl.models.lora import add_lora

    if model.dtype == "int4":
        raise ConfigError(f"{model.path}: the memory of weights in int4 is not modelled: try it with dtype=bfloat16")
    configured = configured_model(
        str(model.path), dtype=model.dtype, kind=kind, trust_remote_code=model.trust_remote_code
    )
    if model.lora is not None:
        add_lora(configured, model.lora)
    return ModelSize.from_model(configured)._replace(fused=False)


def pasted(plan: PlacementPlan) -> str:
    """The plan as settings, in YAML."""
    engine = plan.generation
    group = next(group for group in plan.groups if group.generation)
    rollout: dict[str, Any] = {"tensor_model_parallel_size": engine.tp, "max_num_seqs": engine.together}
    if group.kv_bytes >= 2**30 / 10:
        rollout["kv_cache_gb"] = ceil(10 * group.kv_bytes / 2**30) / 10
    devices, names = placement(plan), ("strategy", "tensor_parallel_size", "pipeline_parallel_size")
    actor = dict(zip(names, plan.choice("actor").key, strict=True))
    changed: dict[str, Any] = {
        "actor_rollout_ref": {"actor": actor, "rollout": rollout},
        "trainer": {"placement": devices},
    }
    if "critic" in devices:
        changed["critic"] = dict(zip(names, plan.choice("critic").key, strict=True))
    return OmegaConf.to_yaml(OmegaConf.create(changed))


def placement(plan: PlacementPlan) -> dict[str, str]:
    """The plan's placement: role -> devices."""
    devices: dict[str, str] = {}
    start = 0
    for group in plan.groups:
        where = f"cuda:{start}" if group.ranks == 1 else f"cuda:{start}-{start + group.ranks - 1}"
        devices |= {role: where for choice in group.choices for role in (choice.model.role, *choice.model.beside)}
        start += group.ranks
    return {role: devices[role] for role in ("actor", *sorted(devices.keys() - {"actor"}))}


def _strategies(key: str, options: TrainOptions, size: ModelSize) -> tuple[Strategy, ...]:
    """The strategies to choose from: `ddp` and `fsdp`, of which settings may leave one."""
    sharding = options.fsdp_config
    if options.deepspeed_config != DeepSpeedOptions():
        raise ConfigError(f"verl plan: {key}: it chooses between ddp and fsdp: leave deepspeed_config out")
    if sharding.fsdp_size != -1:
        raise ConfigError(f"verl plan: {key}.fsdp_config.fsdp_size: replicas of cut models are not modelled")
    by_fsdp = fsdp(size.itemsize, offloaded=sharding.param_offload, parked=sharding.optimizer_offload)
    if sharding != FSDPConfig():
        return (by_fsdp,)
    return ddp(size.itemsize, options.optim.moments == "float32"), by_fsdp


def reward_models(config: Config) -> list[tuple[str, RewardPart]]:
    """The models that score, with the role of each: "reward" or "cost"."""
    sections = [(role, getattr(config, role)) for role in ("reward", "cost")]
    parts = [(role, part) for role, section in sections for part in (section, *section.components.values())]
    return [(role, part) for role, part in parts if part.model is not None]
