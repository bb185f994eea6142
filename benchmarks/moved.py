"""What a transition of weights moves, in bytes, and between which ranks: counted from its plan, without running it."""

from __future__ import annotations

import math
from typing import NamedTuple

from verl.hybrid.plan import Plan
from verl.layout import DIMS, Mesh


class Moved(NamedTuple):
    """Bytes of one rank: what it receives, what of its target part it holds already, its parts in target and source."""

    received: int
    own: int
    target: int
    source: int


def moved_bytes(plan: Plan, rank: int, *, cut_alone: bool = False) -> Moved:
    """What the transition is for a rank, in bytes.

    Args:
        cut_alone: of the weights that source or target cuts over `tp`, `ep` or `shard`, and of all weights of a source
            with stages.
    """
    names = {name for name in plan.specs if not cut_alone or is_cut(plan, name)}
    received = own = 0
    for region in (region for bucket in plan.incoming(rank) for region in bucket if region.name in names):
        size = region.numel * plan.specs[region.name].dtype.itemsize
        received, own = (received, own + size) if region.source == rank else (received + size, own)
    held = sum(
        math.prod(block.shape) * spec.dtype.itemsize
        for spec in plan.specs.values()
        if spec.name in names
        for block in plan.held(rank, spec.name)
    )
    return Moved(received=received, own=own, target=received + own, source=held)


def is_cut(plan: Plan, name: str) -> bool:
    """Whether ranks of the source have different parts of a weight, or some have none."""
    spec = plan.specs[name]
    return bool(spec.cuts) or 0 < len(spec.stages) < plan.source.layout.pp


def micro_groups(train: Mesh, generation: Mesh) -> list[tuple[int, ...]]:
    """The micro data-parallel groups: ranks with the same part of the weights in generation, out of one replica of
    training; each group in the order of the generation replicas."""
    groups: dict[tuple[int, ...], list[int]] = {}
    gathered = ("pp", "tp", *(("shard",) if train.layout.shard > 1 else ()))
    for rank in generation.ranks:
        trains, generates = train.coordinate(rank), generation.coordinate(rank)
        key = (generates["pp"], generates["tp"], *(trains[dim] for dim in DIMS if dim not in gathered))
        groups.setdefault(key, []).append(rank)
    return [*map(tuple, groups.values())]
