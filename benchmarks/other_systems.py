"""Other systems in the same cost model, and the set-up of HybridFlow's evaluation (arXiv 2409.19256, section 8.1).

Each is written down by what its paper or its defaults say; docs/planner.md has where that falls short of the figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from verl.errors import ConfigError
from verl.models.memory import ModelSize
from verl.planner.cost import Costs, Workload
from verl.planner.hardware import Cluster
from verl.planner.memory import ALL, Strategy
from verl.planner.search import Choice, Model, PlacementPlan, Problem, choices, fits, search, sizes

#: Llama's sizes (34B is CodeLlama's): (layers, hidden, intermediate, heads, key-value heads).
_LLAMA = {
    "7B": (32, 4096, 11008, 32, 32),
    "13B": (40, 5120, 13824, 40, 40),
    "34B": (48, 8192, 22016, 64, 8),
    "70B": (80, 8192, 28672, 64, 8),
}
#: bf16 weights, fp32 gradients and optimizer: Megatron's, with and without its distributed optimizer, and ZeRO-3.
MEGATRON = Strategy("3d", 2, 4, 12)
DISTRIBUTED = Strategy("3d", 2, 4, 12, frozenset({"optimizer"}))
ZERO3 = Strategy("zero3", 2, 4, 12, ALL, wire=(2, 2))
COLOCATED = [["actor", "critic", "reference", "reward"]]
SPLIT = [["actor", "reference"], ["critic", "reward"]]
STANDALONE = [["actor"], ["critic"], ["reference"], ["reward"]]


def llama(name: str) -> ModelSize:
    """A Llama in bf16."""
    layers, hidden, intermediate, heads, kv_heads = _LLAMA[name]
    width = hidden // heads
    attention = 2 * hidden * hidden + 2 * hidden * kv_heads * width
    count = layers * (attention + 3 * hidden * intermediate + 2 * hidden) + (2 * 32000 + 1) * hidden
    return ModelSize(count, layers, hidden, intermediate, heads, kv_heads, width, 32000, 2)


def evaluation(
    actor: str, gpus: int, critic: str | None = None, cluster: Cluster | None = None, work: Workload | None = None
) -> Problem:
    """PPO as in the paper's evaluation: machines of 8 A100 with 200 Gbit/s between them, 1,024 prompts of 1,024 tokens,
    responses of 1,024, 8 updates.

    Args:
        critic: size of critic and reward model (None: the actor's).
    """
    policy, value = llama(actor), llama(critic or actor)
    cluster = cluster or Cluster.parse(f"{max(1, gpus // 8)}x{min(gpus, 8)}xA100", 200)
    models = (
        Model("actor", policy, True, (DISTRIBUTED,)),
        Model("critic", value, True, (DISTRIBUTED,)),
        Model("reference", policy, False, (DISTRIBUTED,)),
        Model("reward", value, False, (DISTRIBUTED,)),
    )
    return Problem(models, work or Workload(), cluster)


@dataclass(frozen=True)
class Outcome:
    """What a system would need for a step. `received`: bytes of weights that a rank receives before generation."""

    seconds: float
    generation: float
    transition: float
    received: float


def outcome(plan: PlacementPlan) -> Outcome:
    """Of one of our own plans."""
    actor, engine = plan.choice("actor"), plan.generation
    costs = Costs(plan.problem.cluster, plan.problem.work)
    received, _ = costs.transition(actor.model.size, actor.strategy, actor.layout, engine.tp)
    return Outcome(plan.seconds, engine.seconds, engine.transition, received)


def deepspeed_chat(problem: Problem) -> Outcome:
    """All models on all devices, ZeRO-3; before generation every rank gathers every weight from all ranks."""
    size, ranks = problem.models[0].size, problem.cluster.size
    plan = _best_micro_batch(problem, COLOCATED)
    engine, whole = plan.generation, size.parameters * size.itemsize
    transition = problem.cluster.gather(whole, (ranks, 1))
    generation = engine.prefill + engine.decode + transition
    return Outcome(plan.seconds - engine.transition + transition, generation, transition, whole * (1 - 1 / ranks))


def openrlhf(problem: Problem) -> Outcome:
    """Every model on devices of its own, ZeRO-3; generation on further ones, each is sent every whole weight."""
    size, cluster = problem.models[0].size, problem.cluster
    whole, costs = size.parameters * size.itemsize, Costs(cluster, problem.work)
    models = (replace(problem.models[0], role="trained actor"), *problem.models[1:])
    found = []
    for count in sizes(cluster):
        if count >= cluster.size or (count % cluster.per_machine and cluster.machines > 1):
            continue
        rest = replace(problem, models=models, cluster=cluster.resized(cluster.size - count))
        room = ((tp, problem.memory - whole / tp) for tp in (1, 2, 4, 8) if count % tp == 0)
        engines = [engine for tp, free in room if (engine := costs.generate(size, count, tp, free))]
        try:
            plan = _best_micro_batch(rest, [["trained actor"], *STANDALONE[1:]])
        except ConfigError:
            continue
        transition = cluster.gather(whole, (plan.choice("trained actor").layout.size, 1))
        transition += cluster.send(whole, cluster.per_machine if cluster.machines > 1 else 1)
        generation = transition + min((engine.prefill + engine.decode for engine in engines), default=float("inf"))
        found.append(Outcome(plan.seconds + generation, generation, transition, whole))
    if not found:
        raise ConfigError("this system has too few devices for its five groups")
    return min(found, key=lambda outcome: outcome.seconds)


def nemo_aligner(problem: Problem) -> Outcome:
    """Actor and reference on one half, critic and reward on the other; generation in the training layout, stage after
    stage, 8 sequences at a time (its default)."""
    half = problem.cluster.size // 2
    by_role = {model.role: choices(problem, replace(model, strategies=(MEGATRON,)), half) for model in problem.models}
    found = []
    for actor, reference in _pairs(problem, by_role, "actor", "reference"):
        layout, size = actor.layout, actor.model.size
        free = fits(problem, (actor, reference))
        engine = Costs(problem.cluster, problem.work).generate(size, half // layout.pp, layout.tp, free, batch=8)
        if engine is not None:
            found.append((engine.seconds, reference.infer, actor.train))
    critics = [(0.0, c.infer + r.infer, c.train) for c, r in _pairs(problem, by_role, "critic", "reward")]
    policy, critic = (min(stages, key=sum) for stages in (found, critics))
    return Outcome(sum(map(max, policy, critic)), policy[0], 0.0, 0.0)


def _pairs(problem: Problem, by_role: Mapping[str, list[Choice]], *roles: str) -> list[tuple[Choice, ...]]:
    return [pair for pair in product(*(by_role[role] for role in roles)) if fits(problem, pair) >= 0]


def _best_micro_batch(problem: Problem, partition: Sequence[Sequence[str]]) -> PlacementPlan:
    """ZeRO-3 gathers all weights for every micro-batch: the best size of it, with or without checkpointing."""
    models = tuple(replace(model, strategies=(ZERO3,), whole=True) for model in problem.models)
    plans = []
    for rows, checkpointing in product((1, 2, 4, 8, 16), (False, True)):
        work = replace(problem.work, micro_batch=rows, checkpointing=checkpointing)
        with suppress(ConfigError):
            plans += search(replace(problem, models=models, work=work), [partition])
    if not plans:
        raise ConfigError("no micro-batch of this system fits")
    return min(plans, key=lambda plan: plan.seconds)
