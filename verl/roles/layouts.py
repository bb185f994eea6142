"""How handles are laid out over ranks, before their workers are made."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, get_args

from verl._host.device import device_name, free_memory, is_here
from verl.cluster.controller import Controller
from verl.errors import ConfigError, shown
from verl.models.memory import ModelSize
from verl.roles.actor import Actor
from verl.roles.critic import Critic
from verl.rollout.options import ENGINES
from verl.training.options import Strategy
from verl.weights.layout import Layout, Mesh, ModelShape, transition_shares

logger = logging.getLogger(__name__)

#: Share of the free memory that weights for generation may take; the rest is for the KV cache and activations.
_WEIGHTS_SHARE = 0.5


def lay_out(handles: Sequence[Actor | Critic], placements: Iterable[Any], strategy: Any, use_amp: bool | None) -> None:
    """Where the models run, and how their ranks share the training; `strategy` is a way of sharing, or a placement.

    Raises:
        ConfigError: more than one placement is given; `strategy` is neither.
    """
    layout = strategy if strategy in get_args(Strategy) else None
    if strategy is not None and layout is None:
        try:
            Controller.of(strategy)
        except ConfigError as error:
            ways = ", ".join(get_args(Strategy))
            raise ConfigError(f"strategy is one of {ways}, or a placement, not {shown(strategy)} ({error})") from error
    choices = [one for one in (*placements, None if layout else strategy) if one is not None]
    if len(choices) > 1:
        raise ConfigError("give the trainer one placement: placement=, strategy=, device_map= or num_rollout_workers=")
    changes: dict[str, Any] = {} if layout is None else {"strategy": layout}
    changes |= {} if use_amp is None else {"use_amp": use_amp}
    for handle in handles:
        if choices:
            handle.set_placement(choices[0])
        if changes:
            handle.train_with(**changes)


def by_workers(rollout: int | None, update: int | None) -> dict[str, int] | None:
    """The placement for numbers of rollout and training ranks; None if neither is set."""
    if rollout is None:
        return None if update is None else {"actor": update}
    return {"rollout": rollout, "actor": 1 if update is None else update}


def enable_hybrid_engine(
    actor: Actor, *, tensor_parallel_size: int | None = None, overlap_comm: bool | None = None
) -> Mesh:
    """Have an actor generate in a layout of its own on the ranks that train it, see `docs/hybrid_engine.md`; log which.

    Args:
        tensor_parallel_size: ranks that share a copy in generation. None: as the actor's settings say, or, where these
            say nothing, the quickest by the planner's model, of sizes whose weights leave half of the free memory.
        overlap_comm: whether weights arrive while prompts are computed; None: as the actor's settings say.

    Returns:
        The mesh of generation.

    Raises:
        ConfigError: the actor's workers are in place, it writes no responses, its engine has weights that are served
            elsewhere, or generation has devices of its own.
    """
    options = actor.rollout_options
    if actor.has_workers:
        raise ConfigError("hybrid engine: the actor's workers are in place: enable it before the first call")
    if actor.head != "lm":
        raise ConfigError(f"hybrid engine: a model with a '{actor.head}' head writes no responses")
    if options.name not in ("auto", *ENGINES):
        raise ConfigError(f"hybrid engine: it is for the engines embedded, hf and vllm, not {options.name!r}")
    pool = actor.controller.mesh.pools.get("rollout")
    if pool is not None and set(pool.devices) != set(actor.controller.mesh.pool("actor").devices):
        raise ConfigError(
            "hybrid engine: placement gives generation devices of its own, where weights travel to after each "
            "update: leave 'rollout' out of the placement"
        )
    chosen = {"overlap_comm": overlap_comm, "tensor_model_parallel_size": tensor_parallel_size}
    changes = {name: value for name, value in chosen.items() if value is not None}
    actor.rollout_options = options.replace(**changes)
    actor.resolve_engine()
    options = actor.rollout_options
    if tensor_parallel_size is None and options.name == "embedded" and options.tensor_model_parallel_size == 1:
        actor.rollout_options = options = options.replace(tensor_model_parallel_size=_best_size(actor))
    meshes = actor.controller.meshes("actor", actor.train_options, options.tensor_parallel)
    train, generation = meshes["train"].layout, meshes["rollout"].layout
    generation.check(ModelShape.of(actor.modules.config))
    if train.is_plain and generation.is_plain:
        logger.info("hybrid engine: every rank trains and generates on the same whole weights: nothing moves")
    else:
        received, held = transition_shares(train, generation)
        logger.info(
            "hybrid engine: training %s, generation %s; before a rollout a rank receives %.0f %% of the weights and "
            "then holds %.0f %% of them%s",
            train.shown,
            generation.shown,
            100 * received,
            100 * held,
            ", which arrive while prompts are computed" if options.overlap_comm else "",
        )
    return meshes["rollout"]


def _best_size(actor: Actor) -> int:
    """Ranks that share the weights in generation: by the planner's model the quickest of those that leave memory for
    what else it takes; where none does, the most. Ranks that hold the whole weights already do not share them."""
    ranks = len(actor.controller.mesh.pool("actor"))
    train = actor.controller.meshes("actor", actor.train_options, 1)["train"].layout
    if train.is_plain:
        return 1
    possible = []  # sizes that divide the ranks, the layout of training and the model's heads
    for size in range(1, ranks + 1):
        with suppress(ConfigError):
            meshes = actor.controller.meshes("actor", actor.train_options, size)
            meshes["rollout"].layout.check(ModelShape.of(actor.modules.config))
            possible.append(size)
    seconds = generation_seconds(actor, train, possible, ranks)
    return min(seconds, key=seconds.__getitem__) if seconds else max(possible, default=1)


def generation_seconds(actor: Actor, train: Layout, sizes: Sequence[int], ranks: int) -> dict[int, float]:
    """The planner's estimate of a typical step's rollout, weight sync included, for each tensor parallel size that fits
    into memory. It uses data-sheet rates (docs/planner.md).

    Args:
        train: the layout of training.
    """
    from verl.planner import memory
    from verl.planner.cost import Workload
    from verl.planner.hardware import CPU, DEVICES, Cluster, sheet_of
    from verl.planner.search import Choice, Model, Problem, generations

    size, options, is_cpu = ModelSize.from_model(actor.modules), actor.rollout_options, actor.device == "cpu"
    device = CPU if is_cpu else sheet_of(device_name(actor.device)) or DEVICES["a100"]
    # The driver of a cluster may see no device: then the data sheet's.
    free = free_memory(actor.device) // (ranks if is_cpu else 1) if is_here(actor.device) else int(device.memory)
    per_machine = ranks if is_cpu else min(ranks, max(1, actor.controller.transport.devices_a_machine))
    cluster = Cluster(-(-ranks // per_machine), per_machine, device, device.network * per_machine)
    strategy = memory.fsdp(size.itemsize) if train.shard > 1 else memory.ddp(size.itemsize)
    model = Model("actor", size, True, (strategy,))
    work = Workload(response=actor.sampling.max_new_tokens, max_num_seqs=options.max_num_seqs)
    usage = memory.estimate(size, strategy, train, work.micro_batch * work.length, head=device.head)
    choice = Choice(model, strategy, train, usage, infer=0.0, train=0.0)
    engines = generations(Problem((model,), work, cluster), choice, ranks, free)
    seconds = {engine.tp: engine.seconds for engine, _ in engines if engine.tp in sizes}
    return {tp: taken for tp, taken in seconds.items() if size.weight_bytes / tp <= _WEIGHTS_SHARE * free}
