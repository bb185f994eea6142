"""HybridFlow's evaluation (arXiv 2409.19256, section 8) in the cost model.

The share of the network was fitted to the transition at 64 GPUs, and the bound of pipeline stages chosen with the
paper's placements in view. What the model misses is stated in docs/planner.md, and not tested here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from statistics import mean

import pytest

from benchmarks.other_systems import (
    COLOCATED,
    SPLIT,
    STANDALONE,
    Outcome,
    deepspeed_chat,
    evaluation,
    nemo_aligner,
    openrlhf,
    outcome,
)
from verl.errors import ConfigError
from verl.planner.hardware import Cluster, Efficiency
from verl.planner.search import PlacementPlan, Problem, search

SIZES = {"7B": (8, 16, 32, 64, 96, 128), "13B": (16, 32, 64, 96, 128), "34B": (32, 64, 96, 128), "70B": (64, 96, 128)}
CASES = [(model, gpus) for model, sizes in SIZES.items() for gpus in sizes]


@cache
def best(model: str, gpus: int) -> PlacementPlan:
    return search(evaluation(model, gpus))[0]


def seconds(problem: Problem, partition: list[list[str]]) -> float:
    return search(problem, [partition])[0].seconds


@cache
def speed_ups(system: object) -> dict[tuple[str, int], float]:
    found = {}
    for model, gpus in CASES:
        try:
            other: Outcome = system(evaluation(model, gpus))  # type: ignore[operator]
        except ConfigError:
            continue  # that system does not fit there
        found[model, gpus] = other.seconds / best(model, gpus).seconds
    return found


def test_transition_of_70b_takes_the_seconds_it_was_fitted_to() -> None:
    assert outcome(best("70B", 64)).transition == pytest.approx(9.6, rel=0.05)


@pytest.mark.parametrize("gpus", [96, 128])
def test_transition_of_70b_takes_as_long_on_more_gpus(gpus: int) -> None:
    assert outcome(best("70B", gpus)).transition == pytest.approx(9.6, rel=0.25)


def test_transition_of_70b_takes_a_ninth_of_openrlhfs() -> None:
    """The paper: 89.1 % less, 78.2 s."""
    problem = evaluation("70B", 64)
    ours, theirs = outcome(best("70B", 64)), openrlhf(problem)
    assert 1 - ours.received / theirs.received == pytest.approx(0.891, abs=0.02)
    assert theirs.transition - ours.transition == pytest.approx(78.2, rel=0.25)


@pytest.mark.parametrize(("model", "gpus"), [case for case in CASES if case[1] <= 64])
def test_colocation_is_best_up_to_64_gpus(model: str, gpus: int) -> None:
    assert len(best(model, gpus).groups) == 1


@pytest.mark.quick("13B-128")
@pytest.mark.parametrize(("model", "gpus"), [("34B", 96), ("34B", 128), ("13B", 128)])
def test_models_stand_apart_on_96_and_128_gpus(model: str, gpus: int) -> None:
    """13B on 96 is a miss: together they take 6 % less than split."""
    plan, problem = best(model, gpus), evaluation(model, gpus)
    assert len(plan.groups) == 2
    assert seconds(problem, SPLIT) < seconds(problem, COLOCATED)
    assert seconds(problem, SPLIT) < 1.02 * plan.seconds


@pytest.mark.slow
def test_flips_do_not_hang_on_the_shares_that_were_not_fitted() -> None:
    for shares in (Efficiency(0.4), Efficiency(0.6), Efficiency(memory=0.8), Efficiency(network=0.4)):
        for gpus, sets in ((64, 1), (128, 2)):
            problem = evaluation("34B", gpus)
            problem = replace(problem, cluster=replace(problem.cluster, efficiency=shares))
            assert len(search(problem)[0].groups) == sets


def test_colocation_of_a_large_critic_pays_until_128_gpus() -> None:
    """13B actor, 70B critic and reward model: apart from the critic at 128, as in the paper."""
    apart = [["actor", "reference", "reward"], ["critic"]]
    small, large = evaluation("13B", 64, "70B"), evaluation("13B", 128, "70B")
    assert seconds(small, COLOCATED) < seconds(small, SPLIT)
    assert seconds(large, apart) < seconds(large, COLOCATED)


def test_strong_scaling() -> None:
    """The paper: 66.8 % on average."""
    found = [
        best(model, gpus[0]).seconds / best(model, gpus[-1]).seconds * gpus[0] / gpus[-1]
        for model, gpus in SIZES.items()
    ]
    assert mean(found) == pytest.approx(0.668, rel=0.25)


@pytest.mark.slow
def test_speed_ups_over_openrlhf() -> None:
    """The paper: 3.25 times on average, 1.68 for 7B on 128 GPUs. The largest, 5.93, is a miss."""
    found = speed_ups(openrlhf)
    assert mean(found.values()) == pytest.approx(3.25, rel=0.25)
    assert found["7B", 128] == pytest.approx(1.68, rel=0.25)


@pytest.mark.slow
def test_other_systems_are_slower_where_the_paper_compares_most() -> None:
    """How much slower is a miss: 1.5 times for 3.67 (DeepSpeed-Chat), 3.8 for 12.5 (NeMo-Aligner)."""
    assert mean(speed_ups(deepspeed_chat).values()) > 1.4
    assert all(speed_ups(deepspeed_chat)[model, 128] > 1.5 for model in SIZES)
    assert min(speed_ups(nemo_aligner).values()) > 2
    largest = max(CASES, key=lambda case: nemo_aligner(evaluation(*case)).generation)
    problem = evaluation(*largest)
    assert nemo_aligner(problem).generation / nemo_aligner(problem).seconds == pytest.approx(0.812, rel=0.25)


def test_a_faster_network_brings_the_models_together_again() -> None:
    problem = evaluation("34B", 128)
    fast = replace(problem, cluster=Cluster.parse("16x8xA100", 3200))
    assert len(search(problem)[0].groups) == 2
    assert seconds(fast, COLOCATED) < seconds(fast, SPLIT)


def test_more_memory_makes_fewer_waves_and_smaller_engines() -> None:
    problem = evaluation("13B", 16)
    device = problem.cluster.device
    large = replace(problem, cluster=replace(problem.cluster, device=replace(device, memory=4 * device.memory)))
    before, after = search(problem)[0].generation, search(large)[0].generation
    assert (before.waves > 1, after.waves) == (True, 1)
    assert after.tp < before.tp


def test_standalone_is_dearest_on_few_gpus() -> None:
    problem = evaluation("7B", 16)
    assert seconds(problem, STANDALONE) > seconds(problem, SPLIT) > seconds(problem, COLOCATED)
