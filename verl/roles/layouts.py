"""How handles are laid out over ranks, before their workers are made."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from verl.device import free_memory
from verl.errors import ConfigError
from verl.hybrid.meshes import paper_table
from verl.layout import Mesh, ModelShape
from verl.models.memory import ModelSize
from verl.roles.actor import Actor
from verl.roles.critic import Critic
from verl.roles.updater import Updater
from verl.training.options import Strategy

logger = logging.getLogger(__name__)

#: Share of the free memory that weights for generation may take; the rest is for the KV cache and activations.
_WEIGHTS_SHARE = 0.5


def lay_out(
    handles: Sequence[Actor | Critic], placement: Any, strategy: Any, device_map: Any, use_amp: bool | None
) -> None:
    """Where the models run, and how their ranks share the training; `strategy` is a way of sharing, or a map."""
    layout = strategy if strategy in get_args(Strategy) else None
    maps = [given for given in (placement, None if layout else strategy, device_map) if given is not None]
    if len(maps) > 1:
        raise ConfigError("give the trainer one map: placement=..., strategy=... or device_map=...")
    changes: dict[str, Any] = {} if layout is None else {"strategy": layout}
    changes |= {} if use_amp is None else {"use_amp": use_amp}
    for handle in handles:
        if maps:
            handle.place(maps[0])
        handle.train_with(**changes)


def enable_hybrid_engine(
    actor: Actor, *, tensor_parallel_size: int | None = None, overlap_comm: bool | None = None
) -> Mesh:
    """Have an actor generate in a layout of its own on the ranks that train it, see `docs/hybrid_engine.md`; log which.

    Args:
        tensor_parallel_size: ranks that share a copy in generation. None: as the actor's settings say, or, where these
            say nothing, the fewest whose weights leave half of the free memory.
        overlap_comm: whether weights arrive while prompts are computed; None: as the actor's settings say.

    Returns:
        The mesh of generation.

    Raises:
        ConfigError: the actor's workers are in place, it writes no responses, its engine has weights that are served
            elsewhere, or generation has slots of its own.
    """
    options = actor.rollout_options
    if actor.has_workers:
        raise ConfigError("hybrid engine: the actor's workers are in place: enable it before the first verb")
    if actor.head != "lm":
        raise ConfigError(f"hybrid engine: a model with a '{actor.head}' head writes no responses")
    if options.name not in ("embedded", "hf", "vllm"):
        raise ConfigError(f"hybrid engine: it is for the engines embedded, hf and vllm, not {options.name!r}")
    if "rollout" in actor.controller.mesh.pools:
        pools = actor.controller.mesh.pools
        if set(pools["rollout"].slots) != set(actor.controller.mesh.pool("actor").slots):
            raise ConfigError(
                "hybrid engine: placement gives generation slots of its own, where weights travel to after each "
                "update: leave 'rollout' out of the map"
            )
    chosen = {"overlap_comm": overlap_comm, "tensor_model_parallel_size": tensor_parallel_size}
    changes = {name: value for name, value in chosen.items() if value is not None}
    actor.rollout_options = options = options.replace(**changes)
    if tensor_parallel_size is None and options.name == "embedded" and options.tensor_model_parallel_size == 1:
        actor.rollout_options = options = options.replace(tensor_model_parallel_size=_fewest(actor))
    meshes = actor.controller.meshes("actor", actor.train_options, options.tensor_parallel).meshes
    train, generation = meshes["train"].layout, meshes["rollout"].layout
    generation.check(ModelShape.of(actor.model.config))
    if train.is_plain and generation.is_plain:
        logger.info("hybrid engine: every rank trains and generates on the same whole weights: nothing moves")
    else:
        share = paper_table(train, generation)["ours"]
        logger.info(
            "hybrid engine: training %s, generation %s; before a rollout a rank receives %.0f %% of the weights and "
            "then holds %.0f %% of them%s",
            train.shown,
            generation.shown,
            100 * share.received,
            100 * share.peak,
            ", which arrive while prompts are computed" if options.overlap_comm else "",
        )
    return meshes["rollout"]


def _fewest(actor: Actor) -> int:
    """Ranks that share the weights in generation: the fewest that leave memory for what else it takes."""
    weights, shape = ModelSize.from_model(actor.model).weight_bytes, ModelShape.of(actor.model.config)
    ranks = actor.controller.mesh.pool("actor")
    free = free_memory(actor.device) // (len(ranks) if actor.device == "cpu" else 1)
    fitting = 1
    for size in range(1, len(ranks) + 1):
        try:
            meshes = actor.controller.meshes("actor", actor.train_options, size).meshes
            meshes["rollout"].layout.check(shape)
        except ConfigError:
            continue
        fitting = size
        if weights / size <= _WEIGHTS_SHARE * free:
            break
    return fitting


class PPORoleUpdater(Updater):
    """`Updater("ppo", ...)` by the words of some scripts.

    Args:
        model: the policy and its value model: `(actor, critic)`, a mapping or an object with `actor` and `critic`; or
            an actor alone, whose critic is made from it.
        engine: "hybrid": `enable_hybrid_engine` for the policy; None: as it is.
        overlap_comm: of that engine.
        **options: of PPO.

    Raises:
        ConfigError: `model` is none of these; no engine has that name, or it cannot be.
    """

    def __init__(
        self, model: Any, engine: str | None = None, *, overlap_comm: bool | None = None, **options: Any
    ) -> None:
        actor, critic = _actor_and_critic(model)
        super().__init__("ppo", actor=actor, critic=critic, **options)
        if engine not in (None, "hybrid"):
            raise ConfigError(f"PPORoleUpdater: no engine is called '{engine}': give 'hybrid', or leave it out")
        if engine is None and overlap_comm is not None:
            raise ConfigError("PPORoleUpdater: overlap_comm is of the hybrid engine: give engine='hybrid', too")
        if engine == "hybrid":
            enable_hybrid_engine(actor, overlap_comm=overlap_comm)


def _actor_and_critic(model: Any) -> tuple[Actor, Critic | None]:
    if isinstance(model, Actor):
        return model, None
    if isinstance(model, Mapping):
        given: Any = model.get("actor"), model.get("critic")
    elif isinstance(model, tuple | list):
        given = tuple(model) if len(model) == 2 else (None, None)
    else:
        given = getattr(model, "actor", None), getattr(model, "critic", None)
    actor, critic = given
    if not isinstance(actor, Actor) or not isinstance(critic, Critic | None):
        raise ConfigError(
            f"PPORoleUpdater: model is an actor and its critic, such as (actor, critic), not {type(model).__name__}"
        )
    return actor, critic
