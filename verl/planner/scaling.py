"""Scaling with the cluster: throughput with the batch as it is, and the batch that keeps more devices busy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from verl.errors import ConfigError
from verl.planner.search import PlacementPlan, Problem, search


@dataclass(frozen=True)
class Scaled:
    """The best plan on `ranks` devices; `efficiency`: its throughput per device, relative to the smallest cluster with
    the batch as it is."""

    ranks: int
    plan: PlacementPlan
    efficiency: float


def scaled(problem: Problem, ranks: int, factor: int = 1) -> Problem:
    """The problem on `ranks` devices with `factor` times the samples a step; the number of optimizer steps stays."""
    work = replace(problem.work, samples=problem.work.samples * factor)
    return replace(problem, cluster=problem.cluster.resized(ranks), work=work)


def strong(problem: Problem, ranks: Sequence[int]) -> list[Scaled]:
    """Strong scaling: the batch as it is, on each number of devices that is enough, compared with the first of them."""
    points: list[Scaled] = []
    for count in ranks:
        try:
            plan = search(scaled(problem, count))[0]
        except ConfigError:
            continue
        base = points[0].plan.throughput / points[0].ranks if points else plan.throughput / count
        points.append(Scaled(count, plan, plan.throughput / count / base))
    return points


def weak(problem: Problem, base: Scaled, ranks: int, least: float = 0.9, most: int = 64) -> Scaled | None:
    """The smallest power of two by which the batch must grow for `least` of linear scaling; None: not up to `most`."""
    for doubled in range(most.bit_length()):
        plan = search(scaled(problem, ranks, 1 << doubled))[0]
        efficiency = (plan.throughput / ranks) / (base.plan.throughput / base.ranks)
        if efficiency >= least:
            return Scaled(ranks, plan, efficiency)
    return None
