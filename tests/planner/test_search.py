"""The search against brute force, at a thousand GPUs, and where it must say no."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from benchmarks.other_systems import evaluation, llama
from verl.errors import ConfigError
from verl.planner import memory
from verl.planner.cost import Costs, Workload
from verl.planner.hardware import GB, Cluster, Efficiency
from verl.planner.picture import peak
from verl.planner.search import (
    Group,
    Model,
    Problem,
    choices,
    fits,
    generations,
    search,
    set_partitions,
    strong,
    weak,
)  # fmt: skip
from verl.weights.layout import Layout

Stages = tuple[float, float, float]


def brute_force(problem: Problem) -> float:
    """Seconds of the best of all maps: any number of devices for a set, any layouts in it."""
    total = problem.cluster.size

    @cache
    def options(roles: frozenset[str], ranks: int) -> list[Stages]:
        models = [model for model in problem.models if model.role in roles]
        found = set()
        for chosen in product(*(choices(problem, model, ranks) for model in models)):
            free = fits(problem, chosen)
            if free < 0:
                continue
            if models[0].role != "actor":
                found.add(Group(ranks, chosen).stages)
            for engine, _ in generations(problem, chosen[0], ranks, free) if models[0].role == "actor" else ():
                found.add(Group(ranks, chosen, engine).stages)
        return [a for a in found if not any(b != a and all(map(float.__le__, b, a)) for b in found)]

    def deals(sets: int, left: int) -> Iterator[tuple[int, ...]]:
        if sets == 1:
            yield (left,)
            return
        for count in range(1, left - sets + 2):
            yield from ((count, *rest) for rest in deals(sets - 1, left - count))

    best = float("inf")
    for partition in set_partitions(problem.models):
        sets = [frozenset(model.role for model in part) for part in partition]
        for counts in deals(len(sets), total):
            for stages in product(*map(options, sets, counts)):
                best = min(best, sum(map(max, *stages, (0.0, 0.0, 0.0))))
    return best


@pytest.mark.parametrize(
    "cluster",
    ["8x1xL40S", "3xA100", *(pytest.param(k, marks=pytest.mark.slow) for k in ("2x4xA100", "8xH100", "6xA100"))],
)
@pytest.mark.parametrize("response", [64, 2048])
def test_the_choice_is_within_a_tenth_of_brute_force(cluster: str, response: int) -> None:
    work = Workload(samples=128, prompt=512, response=response, updates=2)
    small = llama("7B")._replace(layers=6, parameters=1_400_000_000)
    sizes = {"actor": small, "critic": small, "reference": small, "reward": small._replace(parameters=700_000_000)}
    kinds = (memory.ddp(), memory.fsdp())
    models = tuple(Model(role, size, role in ("actor", "critic"), kinds) for role, size in sizes.items())
    problem = Problem(models, work, Cluster.parse(cluster), most_pipeline=2)
    best = brute_force(problem)
    assert best <= search(problem)[0].seconds <= 1.1 * best


@pytest.mark.slow
def test_four_models_on_a_thousand_gpus_in_under_a_minute() -> None:
    begun = time.process_time()
    plan = search(evaluation("70B", 1024))[0]
    assert time.process_time() - begun < 60
    assert sum(group.ranks for group in plan.groups) <= 1024


def test_set_partitions_of_four_are_fifteen() -> None:
    assert len(list(set_partitions(evaluation("7B", 8).models))) == 15


def test_plans_fit_in_memory() -> None:
    for plan in search(evaluation("13B", 32)):
        assert all(peak(plan, group) <= plan.problem.memory for group in plan.groups)


def test_what_does_not_fit_says_what_it_would_take() -> None:
    with pytest.raises(ConfigError, match=r"do not fit in 1 x 8 A100.*actor at least .* GB"):
        search(evaluation("70B", 8))


def test_smaller_devices_cut_a_model_into_more_pieces() -> None:
    large, small = (
        search(replace(evaluation("7B", 8), cluster=Cluster.parse(kind)))[0] for kind in ("8xH200", "8xA100")
    )
    cut = [plan.choice("actor").layout for plan in (large, small)]
    assert cut[0].tp * cut[0].pp <= cut[1].tp * cut[1].pp
    assert large.generation.waves < small.generation.waves


def test_a_slow_link_turns_tensor_parallelism_into_pipelines() -> None:
    problem = replace(evaluation("7B", 8), cluster=Cluster.parse("8xA100"))
    slow = replace(problem.cluster, device=replace(problem.cluster.device, link=8 * GB))
    before, after = (search(p)[0].choice("actor").layout for p in (problem, replace(problem, cluster=slow)))
    assert after.tp < before.tp
    assert after.pp > before.pp


def test_13b_trains_on_four_ranks_within_24_gb_with_the_optimizer_offloaded() -> None:
    """Row D7: actor and reference; pieces, moments and gradients in host memory."""
    size = llama("13B")
    work = Workload(samples=64, n=8, prompt=512, response=512, updates=1, checkpointing=True, max_num_seqs=16)
    models = (
        Model("actor", size, True, (memory.fsdp(offloaded=True),)),
        Model("reference", size, False, (memory.fsdp(),)),
    )
    cluster = Cluster.parse("4xRTX4090")
    plan = search(Problem(models, work, cluster))[0]
    assert max(peak(plan, group) for group in plan.groups) < 24 * GB
    with pytest.raises(ConfigError):
        search(Problem((replace(models[0], strategies=(memory.fsdp(),)), models[1]), work, cluster))


@pytest.mark.slow
def test_a_thousand_gpus_scale_to_nine_tenths_with_a_batch_that_grows_with_them() -> None:
    """Row F4: 13B on machines of 8 A100 with 8 x 200 Gbit/s."""
    problem = evaluation("13B", 64, cluster=Cluster.parse("8x8xA100"))
    base = strong(problem, [64])[0]
    assert strong(problem, [64, 1024])[-1].per_device < 0.6 * base.per_device
    grown = weak(problem, base, 1024, most=16)
    assert grown is not None
    assert grown.per_device >= 0.9 * base.per_device


def test_rollouts_of_70b_stay_under_a_minute_by_taking_more_gpus() -> None:
    few = replace(evaluation("70B", 64), most_seconds=60)
    plan = search(few)[0]
    assert plan.generation.seconds <= 60
    with pytest.raises(ConfigError, match="not within 20 s"):
        search(replace(few, most_seconds=20))


def test_parked_and_offloaded_optimizers_cost_time_and_save_memory() -> None:
    size, layout = llama("7B"), Layout(shard=4)
    costs = Costs(Cluster.parse("4xA100"), Workload(updates=1))
    usual, parked, offloaded = memory.fsdp(), memory.fsdp(parked=True), memory.fsdp(offloaded=True)
    usages = [memory.estimate(size, strategy, layout, 2048) for strategy in (usual, parked, offloaded)]
    assert usages[0].resting > usages[1].resting > usages[2].resting == 0
    assert usages[0].peak == usages[1].peak > usages[2].peak
    count = size.parameters / 4
    assert [usage.host for usage in usages] == [0, 8 * count, 16 * count]
    assert costs.train(size, usual, layout) < costs.train(size, parked, layout)
    assert costs.train(size, usual, layout) < costs.train(size, offloaded, layout)


def test_a_gather_between_machines_shares_their_network() -> None:
    cluster = Cluster.parse("2x8xA100", 200, Efficiency(1, 1, 1))
    assert cluster.gather(GB, (16, 1)) == pytest.approx(0.5 / 25, rel=0.01)  # one ring
    assert cluster.gather(GB, (2, 8)) == pytest.approx(8 * 0.5 / 25, rel=0.01)  # eight groups through one card
    assert cluster.gather(GB, (8, 1)) == pytest.approx(7 / 8 / 300, rel=0.02)
    assert cluster.gather(GB, (1, 1)) == 0


@pytest.mark.parametrize("network", [0, -1, float("nan"), float("inf")])
def test_a_network_that_is_none_is_refused(network: float) -> None:
    with pytest.raises(ConfigError, match=r"--network: Gbit/s of a machine are above 0|network_gbps: must be a number"):
        Cluster.parse("2x8xA100", network)


@pytest.mark.parametrize("devices", [1, 3, 7, 96])
def test_what_does_not_fit_is_larger_than_what_there_is(devices: int) -> None:
    """Of one model, which what others take cannot keep out."""
    problem = evaluation("70B", 8)
    actor = replace(problem.models[0], strategies=(memory.ddp(),))
    work = replace(problem.work, micro_batch=(1 << 19) // problem.work.length)
    with pytest.raises(ConfigError, match="do not fit") as error:
        search(replace(problem, models=(actor,), work=work, cluster=Cluster.parse(f"{devices}xA100")))
    needed = float(str(error.value).split("at least ")[1].split()[0])
    assert needed > problem.memory / GB and f"with {problem.work.length * work.micro_batch} tokens" in str(error.value)


def test_shards_that_become_tensor_parallel_are_paid_for() -> None:
    """As the plan of a transfer counts it: rows of which each rank has columns come from all ranks."""
    size, costs = llama("7B"), Costs(Cluster.parse("8xA100"), Workload())
    whole = size.parameters * size.itemsize
    for shards, tp in ((2, 2), (4, 2), (8, 4)):
        received, seconds = costs.transition(size, memory.fsdp(), Layout(shard=shards), tp)
        assert whole * (1 / tp - 1 / shards) < received < whole / tp and seconds > 0
    assert costs.transition(size, memory.ddp(), Layout(replicate=8), 1) == (0.0, 0.0)
    assert costs.transition(size, memory.ddp(), Layout(tp=2, replicate=4), 2) == (0.0, 0.0)


@pytest.mark.parametrize("text", ["16x8", "0x8xA100", "4xT1000", "A100"])
def test_a_cluster_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--cluster"):
        Cluster.parse(text)
