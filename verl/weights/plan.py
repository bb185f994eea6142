"""The transfers that turn weights in one layout into another: computed, not measured, without a process group.

All ranks compute the same plan. A slice that another rank lacks travels once; a rank never receives what it has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, product
from operator import itemgetter
from typing import NamedTuple

from verl.errors import ConfigError
from verl.weights.layout import Mesh
from verl.weights.shard import Shape, ShardedDim, ShardSlice, Slice, WeightSpec, buckets, shard_slices

#: Of the weights that travel at a time, by default.
BUCKET_BYTES = 32 << 20


class SliceTransfer(NamedTuple):
    """A slice of a weight, which rank sends it to which (the same one where it has it already), and where in the
    target's shard it goes."""

    name: str
    slice: Slice
    source: int
    target: int
    local: Slice


class RowSlice(NamedTuple):
    """Rows `low` up to `high` of a weight; of one without dimensions, all."""

    name: str
    low: int
    high: int


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """See `transition`.

    Attributes:
        source, target: the meshes.
        specs: the weights, as `source` cuts them.
        sharded_dims: how `target` cuts each.
        buckets: what moves together, in the order of the weights.
    """

    source: Mesh
    target: Mesh
    specs: Mapping[str, WeightSpec]
    sharded_dims: Mapping[str, tuple[ShardedDim, ...]]
    buckets: tuple[tuple[RowSlice, ...], ...]
    _incoming: dict[int, tuple[tuple[SliceTransfer, ...], ...]] = field(default_factory=dict, repr=False)

    @cached_property
    def last(self) -> dict[str, int]:
        """By weight, the number of the last bucket that has a part of it."""
        return {item.name: number for number, bucket in enumerate(self.buckets) for item in bucket}

    def names(self, rank: int) -> list[str]:
        """The weights of which a rank has a part in the target."""
        return [name for name in self.specs if self._stage_holds(rank, name)]

    def blocks(self, rank: int, name: str) -> tuple[ShardSlice, ...]:
        """The blocks of a rank's part of a weight in the target."""
        if not self._stage_holds(rank, name):
            return ()
        return shard_slices(
            self.specs[name].shape, self.sharded_dims[name], self.target.layout.sizes, self.target.coordinate(rank)
        )

    def local_shape(self, rank: int, name: str) -> Shape:
        """The shape of a rank's part of a weight in the target."""
        blocks, shape = self.blocks(rank, name), self.specs[name].shape
        ends = ([start + size for start, size in zip(*block.local, strict=True)] for block in blocks)
        return tuple(map(max, zip(*ends, strict=True))) if blocks else (0,) * len(shape)

    def held(self, rank: int, name: str) -> tuple[ShardSlice, ...]:
        """The blocks of a rank's part of a weight in the source."""
        spec = self.specs[name]
        if rank not in self.source.ranks or (spec.stages and self.source.coordinate(rank)["pp"] not in spec.stages):
            return ()
        return shard_slices(spec.shape, spec.sharded_dims, self.source.layout.sizes, self.source.coordinate(rank))

    def incoming(self, rank: int) -> tuple[tuple[SliceTransfer, ...], ...]:
        """By bucket, the transfers that a rank's part in the target is made of, its own included."""
        if rank not in self._incoming:
            self._incoming[rank] = tuple(
                tuple(chain.from_iterable(self._transfers(rank, rows) for rows in bucket)) for bucket in self.buckets
            )
        return self._incoming[rank]

    def outgoing(self, rank: int) -> tuple[tuple[SliceTransfer, ...], ...]:
        """By bucket, the transfers that a rank gives to others."""
        readers = [self.incoming(other) for other in self.target.ranks if other != rank]
        return tuple(
            tuple(transfer for reader in readers for transfer in reader[number] if transfer.source == rank)
            for number in range(len(self.buckets))
        )

    def _stage_holds(self, rank: int, name: str) -> bool:
        """Whether the target's stage of a rank has a weight: stages of the source that follow each other are one."""
        if rank not in self.target.ranks:
            return False
        stages = self.specs[name].stages
        joined = self.source.layout.pp // self.target.layout.pp
        first = self.target.coordinate(rank)["pp"] * joined
        return not stages or any(stage in stages for stage in range(first, first + joined))

    def _transfers(self, rank: int, item: RowSlice) -> Iterator[SliceTransfer]:
        spec = self.specs[item.name]
        dims = len(spec.shape)
        rows = Slice((item.low, *[0] * dims)[:dims], (item.high - item.low, *spec.shape[1:])[:dims])
        for block in self.blocks(rank, item.name):
            wanted = block.slice & rows
            for source, held in self._holders(rank, spec) if wanted.numel else ():
                if (common := wanted & held.slice).numel:
                    starts = zip(common.offset, block.slice.offset, block.local.offset, strict=True)
                    local = Slice(tuple(start - low + local_start for start, low, local_start in starts), common.shape)
                    yield SliceTransfer(item.name, common, source, rank, local)

    def _holders(self, rank: int, spec: WeightSpec) -> Iterator[tuple[int, ShardSlice]]:
        """All blocks of a weight, each once, and of the ranks that have it in the source the one nearest to `rank`:
        itself if it is one of them, else one of its own replica."""
        ranks, layout = self.source.ranks, self.source.layout
        near = self.source.coordinate(rank if rank in ranks else ranks[self.target.ranks.index(rank) % len(ranks)])
        if spec.stages and near["pp"] not in spec.stages:
            near = {**near, "pp": min(spec.stages, key=lambda stage: abs(stage - near["pp"]))}
        dims = [cut.dim for cut in spec.sharded_dims]
        for index in product(*(range(layout.sizes[dim]) for dim in dims)):
            coordinate = {**near, **dict(zip(dims, index, strict=True))}
            holder = ranks[layout.index(coordinate)]
            for block in shard_slices(spec.shape, spec.sharded_dims, layout.sizes, coordinate):
                yield holder, block


def transition(
    source: Mesh,
    target: Mesh,
    specs: Mapping[str, WeightSpec],
    sharded_dims: Mapping[str, Sequence[ShardedDim]] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> ReshardPlan:
    """How weights laid out over `source` get into the layout of `target`, on the same or on other ranks.

    Args:
        specs: the weights as the source cuts them, in the order in which they are wanted.
        sharded_dims: how the target cuts each; None: as the source does, along the dimensions that the target has.
        bucket_bytes: most bytes of a rank's part in the target that move together, if a row has no more.

    Raises:
        ConfigError: a cut is along a dimension that its mesh lacks, or stages cannot be joined.
    """
    if source.layout.pp % target.layout.pp:
        raise ConfigError(
            f"transition: {source.layout.pp} pipeline stages cannot become {target.layout.pp}: stages are joined, "
            "never split"
        )
    wide = {dim for dim, size in target.layout.sizes.items() if size > 1}
    if sharded_dims is None:
        target_dims = {name: tuple(cut for cut in spec.sharded_dims if cut.dim in wide) for name, spec in specs.items()}
        if missing := wide & {"tp", "ep", "shard"} - {cut.dim for spec in specs.values() for cut in spec.sharded_dims}:
            raise ConfigError(
                f"transition: the weights are not cut along {', '.join(sorted(missing))} in the source: say how the "
                "target cuts them (sharded_dims)"
            )
    else:
        target_dims = {name: tuple(sharded_dims[name]) for name in specs}
    sized = buckets(_sized_rows(specs, target_dims, target, bucket_bytes), itemgetter(1), bucket_bytes)
    return ReshardPlan(source, target, specs, target_dims, tuple(tuple(item for item, _ in bucket) for bucket in sized))


def _sized_rows(
    specs: Mapping[str, WeightSpec], sharded_dims: Mapping[str, tuple[ShardedDim, ...]], target: Mesh, limit: int
) -> Iterator[tuple[RowSlice, int]]:
    """What moves at once of each weight, and the bytes of a rank's part of the whole weight."""
    for name, spec in specs.items():
        rows = spec.shape[0] if spec.shape else 1
        part = spec.nbytes // math.prod(getattr(target.layout, cut.dim) for cut in sharded_dims[name])
        # A cut along the rows leaves whole rows, and ranks whose part they are not move nothing of them.
        row_parts = math.prod(getattr(target.layout, cut.dim) for cut in sharded_dims[name] if cut.axis)
        row = max(1, spec.nbytes // max(rows * row_parts, 1))
        step = max(1, limit // row) if part > limit else rows
        yield from ((RowSlice(name, low, min(low + step, rows)), part) for low in range(0, rows, step))
