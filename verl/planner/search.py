"""The best placement and its parallel sizes, by the algorithm of HybridFlow (arXiv 2409.19256, section 6).

All ways to put models together (set partitions) and to deal devices to the sets; for every set and number of devices
the best layouts that fit in memory together. A step has three stages, generation, preparation and training: sets work
side by side in a stage, models of a set one after the other.

Two deviations: layouts of a set are chosen jointly, because what one model keeps is missing from another's KV cache;
and a set of several machines has whole machines, a set within one a power of two of its devices or a divisor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import product
from math import gcd

from verl.errors import ConfigError
from verl.models.memory import ModelSize
from verl.planner import memory
from verl.planner.cost import Costs, Generation, Workload
from verl.planner.hardware import GB, Cluster
from verl.planner.memory import RESERVE, Strategy, Usage
from verl.weights.layout import Layout

#: Tokens of a step of generation.
_STEP_TOKENS = 8192
#: How a model runs, as far as settings say: strategy, tensor- and pipeline-parallel size.
Key = tuple[str, int, int]
STAGES = ("generation", "preparation", "training")


@dataclass(frozen=True, eq=False)  # a key of caches by what it is, which is quick
class Model:
    """A model of the step.

    Attributes:
        role: as a placement names it.
        trained: or only read.
        strategies: those to choose from.
        whole: its ranks are data-parallel only.
        follows: the role whose strategy and sizes it has.
        beside: roles of further models of its kind, on the same ranks.
    """

    role: str
    size: ModelSize
    trained: bool
    strategies: tuple[Strategy, ...]
    whole: bool = False
    follows: str = ""
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """Models to place on a cluster. `most_seconds`: bound of generation; `most_pipeline`: of pipeline stages."""

    models: tuple[Model, ...]
    work: Workload
    cluster: Cluster
    most_seconds: float = float("inf")
    most_pipeline: int = 16

    @property
    def memory(self) -> float:
        """Bytes of a rank that can be used."""
        return self.cluster.device.memory * (1 - RESERVE)


@dataclass(frozen=True)
class Choice:
    """A model with one strategy and layout. `infer` and `train`: seconds a step."""

    model: Model
    strategy: Strategy
    layout: Layout
    usage: Usage
    infer: float
    train: float

    @property
    def key(self) -> Key:
        """What settings say of it."""
        return self.strategy.name, self.layout.tp, self.layout.pp


@dataclass(frozen=True)
class Group:
    """Models that share ranks. `stages`: seconds of each of `STAGES`."""

    ranks: int
    choices: tuple[Choice, ...]
    generation: Generation | None = None
    kv_bytes: float = 0.0

    @cached_property
    def stages(self) -> tuple[float, float, float]:
        generation = self.generation.seconds if self.generation else 0.0
        return generation, sum(c.infer for c in self.choices), sum(c.train for c in self.choices)

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(choice.model.role for choice in self.choices)


@dataclass(frozen=True)
class PlacementPlan:
    """A placement: its sets in the order of their devices. `stages` and `seconds`: of one step."""

    problem: Problem
    groups: tuple[Group, ...]

    @cached_property
    def stages(self) -> tuple[float, ...]:
        return tuple(map(max, zip(*(group.stages for group in self.groups), strict=True)))

    @property
    def seconds(self) -> float:
        return sum(self.stages)

    @property
    def throughput(self) -> float:
        """Tokens of prompts and responses a second."""
        return self.problem.work.samples * self.problem.work.length / self.seconds

    @property
    def per_device(self) -> float:
        """Throughput of one of the cluster's devices."""
        return self.throughput / self.problem.cluster.size

    @property
    def generation(self) -> Generation:
        return next(group.generation for group in self.groups if group.generation)

    def choice(self, role: str) -> Choice:
        return next(choice for group in self.groups for choice in group.choices if choice.model.role == role)

    def __str__(self) -> str:
        return " | ".join(f"{'+'.join(group.roles)} on {group.ranks}" for group in self.groups)


def search(problem: Problem, partitions: Sequence[Sequence[Sequence[str]]] | None = None) -> list[PlacementPlan]:
    """The best placement of every partition of the models, best first.

    Args:
        partitions: those to look at, by role (None: all).

    Raises:
        ConfigError: nothing fits; says what would be the least.
    """
    by_role = {model.role: model for model in problem.models}
    named = ([[by_role[role] for role in part] for part in partition] for partition in partitions or ())
    wanted = set_partitions(problem.models) if partitions is None else named
    table = _Table(problem)
    plans = [plan for partition in wanted if (plan := _best_allocation(problem, partition, table))]
    if not plans:
        raise ConfigError(_too_small(problem))
    return sorted(plans, key=lambda plan: plan.seconds)


def set_partitions(models: Sequence[Model]) -> Iterator[list[list[Model]]]:
    """All ways to put models together: 15 of four."""
    if not models:
        yield []
        return
    first, rest = models[0], models[1:]
    for partition in set_partitions(rest):
        yield [[first], *partition]
        for i, part in enumerate(partition):
            yield [*partition[:i], [first, *part], *partition[i + 1 :]]


def choices(problem: Problem, model: Model, ranks: int) -> list[Choice]:
    """All ways to run a model on `ranks` devices, quickest first."""
    work, costs, possible = problem.work, Costs(problem.cluster, problem.work), []
    for strategy, layout in _layouts(problem, model, ranks):
        usage = _usage(problem, model, strategy, layout)
        scores = not (model.trained and model.role == "actor") or work.old_log_probs
        times = 1 + len(model.beside)
        infer = times * costs.passes(model.size, strategy, layout, work.samples, backward=False) if scores else 0.0
        train = times * costs.train(model.size, strategy, layout) if model.trained else 0.0
        if usage.peak <= problem.memory:
            possible.append(Choice(model, strategy, layout, usage, infer, train))
    return sorted(possible, key=lambda choice: choice.infer + choice.train)


def _usage(problem: Problem, model: Model, strategy: Strategy, layout: Layout) -> Usage:
    """The memory of a model, with the others of its kind."""
    work, times = problem.work, 1 + len(model.beside)
    usage = memory.estimate(
        model.size,
        strategy,
        layout,
        work.micro_batch * work.length,
        checkpointing=work.checkpointing,
        trained=model.trained,
        head=problem.cluster.device.head,
    )
    return replace(usage, host=times * usage.host, kept={part: times * kept for part, kept in usage.kept.items()})


def generations(problem: Problem, actor: Choice, ranks: int, free: float) -> Iterator[tuple[Generation, float]]:
    """Generation at every size that the hybrid engine can give it, with the bytes of its KV cache.

    Args:
        free: bytes of a rank that its models do not keep.
    """
    size, layout, work = actor.model.size, actor.layout, problem.work
    costs = Costs(problem.cluster, work)
    most = layout.tp * (layout.data_size if actor.strategy.gathers else 1)
    for tp in _tensor_sizes(problem, size, gcd(ranks, most)):
        engine = costs.generate(size, ranks, tp, free - generation_bytes(problem, actor, tp))
        if engine is None:
            continue
        _, seconds = costs.transition(size, actor.strategy, layout, tp)
        engine = replace(engine, transition=seconds)
        if engine.seconds <= problem.most_seconds:
            tokens = engine.together * (work.prompt / work.n + work.response)
            yield engine, tokens * size.kv_bytes_per_token(tp)


def generation_bytes(problem: Problem, actor: Choice, tp: int) -> float:
    """Bytes of a rank that generation needs beyond its models and the KV cache."""
    size, sequences = actor.model.size, problem.work.max_num_seqs
    # Where training does not gather, its shards are slices of the generation weights, and are not held twice.
    held = 0.0 if actor.strategy.gathers else actor.usage.kept["weights"]
    # The activations and logits of a step.
    wide = 2 * (size.heads + size.kv_heads) * size.head_dim + 2 * size.intermediate
    rows = (_STEP_TOKENS + sequences) * (4 * size.hidden + wide / tp) + sequences * size.vocab / tp
    return size.weight_bytes / tp - held + rows * size.itemsize


def fits(problem: Problem, chosen: Sequence[Choice]) -> float:
    """Bytes left of a rank while none of the models on it works; negative where one has no room to."""
    resting = sum(choice.usage.resting for choice in chosen)
    work = max(choice.usage.peak - choice.usage.resting for choice in chosen)
    return problem.memory - resting if resting + work <= problem.memory else -1.0


class _Table:
    """The best group of every set of models on every number of ranks, computed once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.group = cache(self._best)
        self._all = cache(partial(choices, problem))

    def keys(self, models: Sequence[Model]) -> list[Key | None]:
        """The ways in which models that are followed from another set may run; None: no such model."""
        roles = {model.role for model in models}
        elsewhere = {model.follows for model in self.problem.models if model.role not in roles}
        followed = next((model for model in models if model.role in elsewhere), None)
        if followed is None:
            return [None]
        ways = {c.key for ranks in sizes(self.problem.cluster) for c in self._frontier(followed, ranks)}
        return sorted(ways, key=str)

    def _best(self, models: tuple[Model, ...], ranks: int, key: Key | None) -> Group | None:
        """The best group on `ranks` devices; `key`: how the models run that are, or follow, another set's.

        Choices are tried in the order of the least that they take, until that is no less than the best so far.
        """
        roles = {model.role for model in models}
        options = []
        for model in models:
            of_model = self._frontier(model, ranks)
            if key is not None and (model.role == "actor" or (model.follows and model.follows not in roles)):
                of_model = [choice for choice in self._all(model, ranks) if choice.key == key]
            # No engine is quicker than with all memory beside the actor.
            alone = ([sum(group.stages) for group in self._groups_of((choice,), ranks)] for choice in of_model)
            options.append([(min(times), choice) for times, choice in zip(alone, of_model, strict=True) if times])
        best, best_seconds = None, float("inf")
        for pairs in sorted(product(*options), key=lambda pairs: sum(seconds for seconds, _ in pairs)):
            if sum(seconds for seconds, _ in pairs) >= best_seconds:
                break
            chosen = tuple(choice for _, choice in pairs)
            keys = {choice.model.role: choice.key for choice in chosen}
            if all(choice.key == keys.get(choice.model.follows, choice.key) for choice in chosen):
                for group in self._groups_of(chosen, ranks):
                    if sum(group.stages) < best_seconds:
                        best, best_seconds = group, sum(group.stages)
        return best

    def _groups_of(self, chosen: tuple[Choice, ...], ranks: int) -> Iterator[Group]:
        """These choices with every way to generate; nothing where memory is too small for them together."""
        free = fits(self.problem, chosen)
        actor = next((choice for choice in chosen if choice.model.role == "actor"), None)
        if free >= 0 and actor is None:
            yield Group(ranks, chosen)
        elif free >= 0 and actor is not None:
            for engine, kv in generations(self.problem, actor, ranks, free):
                yield Group(ranks, chosen, engine, kv)

    def _frontier(self, model: Model, ranks: int) -> list[Choice]:
        """The choices that no other one beats in both time and memory, and those that a follower may need."""
        kept: list[Choice] = []
        followed = {other.follows for other in self.problem.models}
        for choice in self._all(model, ranks):
            beaten = any(f.usage.resting <= choice.usage.resting and f.usage.peak <= choice.usage.peak for f in kept)
            if not beaten or model.follows or model.role in followed:
                kept.append(choice)
        return kept


def sizes(cluster: Cluster) -> list[int]:
    """Numbers of devices that a set may have."""
    machine = min(cluster.per_machine, cluster.size)
    inside = [count for count in range(1, machine + 1) if not (count & (count - 1) and machine % count)]
    whole = [cluster.per_machine * machines for machines in range(1, cluster.machines + 1)]
    return sorted({*inside, *whole})


def _best_allocation(problem: Problem, partition: Sequence[Sequence[Model]], table: _Table) -> PlacementPlan | None:
    """The best way to deal the devices to the sets of a partition; bounded by the stages of the sets dealt so far."""
    counts, total = sizes(problem.cluster), problem.cluster.size
    best: tuple[float, tuple[Group, ...]] | None = None
    order = sorted(map(tuple, partition), key=lambda models: all(model.role != "actor" for model in models))

    def deal(key: Key | None, number: int, left: int, stages: tuple[float, ...], dealt: tuple[Group, ...]) -> None:
        nonlocal best
        if number == len(order):
            if best is None or sum(stages) < best[0]:
                best = sum(stages), dealt
            return
        for count in counts:
            if count > left - (len(order) - number - 1):
                break
            group = table.group(order[number], count, key)
            if group is None:
                continue
            slowest = tuple(map(max, stages, group.stages))
            if best is None or sum(slowest) < best[0]:
                deal(key, number + 1, left - count, slowest, (*dealt, group))

    for key in table.keys(order[0]):
        deal(key, 0, total, (0.0,) * len(STAGES), ())
    return PlacementPlan(problem, best[1]) if best else None


def _layouts(problem: Problem, model: Model, ranks: int) -> Iterator[tuple[Strategy, Layout]]:
    for tp in [1] if model.whole else _tensor_sizes(problem, model.size, ranks):
        most = 1 if model.whole else min(problem.most_pipeline, ranks // tp, model.size.layers)
        for pp, strategy in product(range(1, most + 1), model.strategies):
            data, rest = divmod(ranks // tp, pp)
            if not rest:
                yield strategy, Layout(pp=pp, tp=tp, **{"shard" if strategy.gathers else "replicate": data})


def _tensor_sizes(problem: Problem, size: ModelSize, ranks: int) -> list[int]:
    """Tensor-parallel sizes within a machine: they divide the ranks, the heads and the key-value heads."""
    common = gcd(ranks, size.heads, size.kv_heads)
    return [tp for tp in range(1, min(problem.cluster.per_machine, common) + 1) if common % tp == 0]


def _too_small(problem: Problem) -> str:
    """Why nothing fits."""
    cluster, work, least = problem.cluster, problem.work, []
    for model in problem.models:
        layouts = _layouts(problem, model, cluster.size)
        most = min((_usage(problem, model, *layout).peak for layout in layouts), default=0)
        least.append(f"{model.role} at least {most / GB:.1f} GB")
    bound = "" if problem.most_seconds == float("inf") else f", or not within {problem.most_seconds:g} s of rollout"
    return (
        f"--cluster: the models do not fit in {cluster}, {problem.memory / GB:.1f} GB of each{bound}: "
        f"{', '.join(least)} alone with {work.micro_batch * work.length} tokens at a time. "
        "Take more devices, a shorter max_tokens_per_micro_batch, model.enable_gradient_checkpointing=true, or "
        "fsdp_config.param_offload=true"
    )


def strong(problem: Problem, ranks: Sequence[int]) -> list[PlacementPlan]:
    """Strong scaling: the best plan of the batch as it is, on each number of devices that is enough."""
    plans = []
    for count in ranks:
        with suppress(ConfigError):
            plans.append(search(replace(problem, cluster=problem.cluster.resized(count)))[0])
    return plans


def weak(problem: Problem, base: PlacementPlan, ranks: int, least: float = 0.9, most: int = 64) -> PlacementPlan | None:
    """The plan on `ranks` devices of the batch, grown by the smallest power of two up to `most`, that has `least` of
    linear scaling from `base`; None: there is none. The number of optimizer steps stays."""
    for doubled in range(most.bit_length()):
        work = replace(problem.work, samples=problem.work.samples << doubled)
        plan = search(replace(problem, cluster=problem.cluster.resized(ranks), work=work))[0]
        if plan.per_device / base.per_device >= least:
            return plan
    return None
