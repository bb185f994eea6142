"""A shard of a weight under its Hugging Face checkpoint name: the one currency of weights.

One stream of shards feeds every sink: checkpoint, export, engine sync, resharding, checksum.
Tied weights occur once in a stream; a sink that needs the alias (an engine's `lm_head.weight`) expands it.

What cuts a weight over ranks is torch: it is a DTensor. The functions from `local_part` on say which parts of it are
where. Imported without torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from verl._base.checked import hinted

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")

#: Of a weight or a block of one: sizes, or an index, by dimension.
Shape: TypeAlias = tuple[int, ...]
#: Of a weight: where each begins, and its elements.
Blocks: TypeAlias = "Iterable[tuple[Shape, Tensor]]"
#: Bytes of shards that travel as one object.
BUNCH = 64 << 20


class Slice(NamedTuple):
    """A slice of a weight: the index where it begins, and its shape."""

    offset: Shape
    shape: Shape

    def __and__(self, other: Slice) -> Slice:
        """What both have in common; without elements if that is nothing."""
        low = tuple(map(max, self.offset, other.offset))
        high = (min(a + m, b + n) for a, m, b, n in zip(*self, *other, strict=True))
        return Slice(low, tuple(max(0, end - start) for start, end in zip(low, high, strict=True)))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, tensor: Tensor, offset: Sequence[int] = ()) -> Tensor:
        """The block of a weight, or of a part of it that begins at `offset`, on the same memory."""
        for dim, (start, here, size) in enumerate(zip(self.offset, offset or repeat(0), self.shape, strict=False)):
            tensor = tensor.narrow(dim, min(start - here, tensor.shape[dim]), size)
        return tensor


@hinted
@dataclass(frozen=True, slots=True)
class Shard:
    """`tensor` is the block of the weight `name` (of `global_shape`) that begins at `offset`, one index a dimension."""

    name: str
    global_shape: Shape
    offset: Shape
    tensor: Tensor

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Shard:
        return cls(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)

    @property
    def is_whole(self) -> bool:
        return tuple(self.tensor.shape) == self.global_shape

    @property
    def slice(self) -> Slice:
        return Slice(self.offset, tuple(self.tensor.shape))

    @property
    def is_inside(self) -> bool:
        """Whether the block lies in the weight."""
        return self.slice & Slice((0,) * len(self.offset), self.global_shape) == self.slice

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


class ShardedDim(NamedTuple):
    """A weight is cut into chunks over the ranks along a mesh dimension.

    Attributes:
        dim: of the mesh.
        axis: of the tensor; None: the flattened tensor is cut, into runs of its elements (the only cut then).
        fused: matrices that lie side by side along the axis, of equal size, each of which is cut by itself.
    """

    dim: str
    axis: int | None
    fused: int = 1


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A weight as a whole.

    Attributes:
        sharded_dims: how it is cut over the ranks of a mesh, in the order of cutting; empty where every rank holds all
            of it.
        stages: the pipeline stages that hold it; empty: all.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    sharded_dims: tuple[ShardedDim, ...] = ()
    stages: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Stream(Iterable[Shard]):
    """Shards that are made when they are iterated over, each time again: `begin` begins the stream."""

    begin: Callable[[], Iterator[Shard]]

    def __iter__(self) -> Iterator[Shard]:
        return self.begin()


def names_digest(names: Iterable[str]) -> str:
    """A digest of the names of tensors, in any order."""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:16]


def checksum(shards: Iterable[Shard]) -> str:
    """SHA-256 over names, places and bytes, the same in whatever order the stream comes."""
    digests = sorted(f"{s.name}{s.offset}:{_digest(s.tensor)}" for s in shards)
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def buckets(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Items in their order, in lists of at most `limit` bytes or of one item that has more."""
    bucket: list[T] = []
    size = 0
    for item in items:
        if bucket and size + nbytes(item) > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += nbytes(item)
    if bucket:
        yield bucket


def in_buckets(shards: Iterable[Shard], *, on_host: bool = True) -> Iterator[list[Shard]]:
    """Shards in lists of at most `BUNCH` bytes, or of one shard that has more; on the CPU or where they are."""
    device = "cpu" if on_host else None
    detached = (replace(shard, tensor=shard.tensor.detach().to(device)) for shard in shards)
    return buckets(detached, lambda shard: shard.nbytes, BUNCH)


def split_large(shards: Iterable[Shard]) -> Iterator[Shard]:
    """Shards of at most `BUNCH` bytes, or one row: larger ones come as several, on the same memory."""
    for shard in shards:
        if shard.nbytes <= BUNCH or not shard.tensor.dim():
            yield shard
            continue
        count = max(1, BUNCH * shard.tensor.shape[0] // shard.nbytes)
        for low in range(0, shard.tensor.shape[0], count):
            offset = (shard.offset[0] + low, *shard.offset[1:])
            yield replace(shard, offset=offset, tensor=shard.tensor[low : low + count])


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, on the same memory. The tensor itself, where it is not cut."""
    cut: Any = tensor
    return cut.to_local() if hasattr(tensor, "placements") else tensor


def rows_of(weight: Tensor) -> range:
    """Which rows of a weight this rank has, where it is cut by them along one dimension of ranks."""
    cut: Any = weight
    count, mesh = len(weight), cut.device_mesh
    each = -(-count // mesh.size())  # the last chunks are shorter, or empty
    start = min(mesh.get_local_rank() * each, count)
    return range(start, min(start + each, count))


def blocks_of(tensor: Tensor, local: Tensor | None = None) -> Blocks:
    """The blocks of a tensor that this rank holds: where each begins, and its part of `local`, on the same memory.

    There are several where fused matrices (query, key and value) are cut one by one, and none where a rank holds
    nothing.

    Args:
        local: a tensor that is cut like it, as this rank has it; None: the tensor's own part.
    """
    local = local_part(tensor) if local is None else local
    if not hasattr(tensor, "placements"):
        yield (0,) * tensor.dim(), local
        return
    cut: Any = tensor
    mesh = cut.device_mesh
    sizes, coordinate = (dict(zip(mesh.mesh_dim_names, of, strict=True)) for of in (mesh.shape, mesh.get_coordinate()))
    for whole, part in shard_slices(tuple(tensor.shape), sharded_dims_of(tensor), sizes, coordinate):
        yield whole.offset, part.of(local)


class ShardSlice(NamedTuple):
    """A slice of a tensor that a rank's shard has: where in the tensor, and where in the shard (of a run: none)."""

    slice: Slice
    local: Slice


def shard_slices(
    shape: Shape, sharded_dims: Sequence[ShardedDim], sizes: Mapping[str, int], coordinate: Mapping[str, int]
) -> tuple[ShardSlice, ...]:
    """The blocks that the part of one rank is made of, for any rank of any mesh.

    Args:
        shape: of the tensor.
        sharded_dims: in the order of cutting.
        sizes: ranks along each mesh dimension.
        coordinate: where the rank stands along each.
    """
    if sharded_dims and sharded_dims[0].axis is None:
        return _run_blocks(shape, sizes[sharded_dims[0].dim], coordinate[sharded_dims[0].dim])
    steps: list[list[tuple[int, int, int]]] = [[] for _ in shape]
    for dim, axis, fused in sharded_dims:
        assert axis is not None
        steps[axis].append((sizes[dim], coordinate[dim], fused))
    runs = [_runs(size, tuple(cut)) for size, cut in zip(shape, steps, strict=True)]
    return tuple(
        ShardSlice(Slice(offset, lengths), Slice(start, lengths))
        for offset, start, lengths in (zip(*block, strict=True) if block else ((), (), ()) for block in product(*runs))
    )


def run_blocks(shape: Shape, start: int, run: Tensor) -> Blocks:
    """The blocks that a run of the elements of a flattened tensor is made of: where each begins in the tensor, and its
    part of `run`, on the same memory.

    Args:
        shape: of the tensor.
        start: where the run begins in it.
        run: its elements, in one dimension.
    """
    if len(shape) < 2:
        if len(run):
            yield (start,)[: len(shape)], run.view(-1) if shape else run.view(())
        return
    inner, done = math.prod(shape[1:]), 0
    while left := len(run) - done:
        row, within = divmod(start + done, inner)
        if within or left < inner:  # a part of one row
            size = min(inner - within, left)
            for offset, block in run_blocks(shape[1:], within, run[done : done + size]):
                yield (row, *offset), block[None]
        else:
            size = left - left % inner
            yield (row, *(0,) * (len(shape) - 1)), run[done : done + size].view(-1, *shape[1:])
        done += size


@lru_cache(maxsize=4096)
def _run_blocks(shape: Shape, ranks: int, index: int) -> tuple[ShardSlice, ...]:
    """The blocks of one of equal runs of a flattened tensor, of which the last may be shorter."""
    import torch

    total = math.prod(shape)
    each = -(-total // ranks)
    run = torch.empty(max(0, min(each, total - index * each)), device="meta")
    blocks = run_blocks(shape, index * each, run)
    return tuple(ShardSlice(Slice(offset, tuple(block.shape)), Slice((), ())) for offset, block in blocks)


@contextmanager
def local_weights(module: torch.nn.Module, without: str = "") -> Iterator[Tensor | None]:
    """A module has this rank's parts of its weights inside; the weight `without` is zero there, and yielded."""
    import torch

    parameters = dict(module._parameters)
    module._parameters.update({name: local_part(weight) for name, weight in parameters.items() if weight is not None})  # type: ignore[misc]
    removed = parameters.get(without)
    if removed is not None:
        module._parameters[without] = torch.zeros_like(removed)  # type: ignore[assignment]
    try:
        yield removed
    finally:
        module._parameters.update(parameters)


@lru_cache(maxsize=4096)
def _runs(size: int, sharded_dims: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    """What one rank has of a dimension, as runs of neighbours: the first index, its place, length.

    Args:
        sharded_dims: ranks, index of this one, and fused matrices, in the order of cutting.
    """
    import torch

    kept = torch.arange(size)
    for ranks, index, fused in sharded_dims:
        kept = torch.cat([(*part.chunk(ranks), *[part[:0]] * ranks)[index] for part in kept.chunk(fused)])
    if not len(kept):
        return ()
    breaks = (kept.diff() != 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()]
    return tuple((int(kept[a]), a, b - a) for a, b in pairwise([*starts, len(kept)]))


def sharded_dims_of(tensor: Tensor) -> tuple[ShardedDim, ...]:
    """How a tensor is cut over the ranks of a mesh, as `WeightSpec.cuts`."""
    cut: Any = tensor
    if not hasattr(tensor, "placements"):
        return ()
    mesh, sharded_dims = cut.device_mesh, []
    parts = dict.fromkeys(range(tensor.dim()), 1)
    # Inner mesh dimensions are cut first: FSDP cuts what tensor parallelism has left. torch writes that as a strided
    # shard, whose split factor counts the parts of the earlier cuts and the fused matrices alike: dividing by the
    # former leaves the latter.
    for dim, size, placement in reversed([*zip(mesh.mesh_dim_names, mesh.shape, cut.placements, strict=True)]):
        if (axis := getattr(placement, "dim", None)) is not None:
            sharded_dims.append(ShardedDim(dim, axis, getattr(placement, "split_factor", parts[axis]) // parts[axis]))
            parts[axis] *= size
    return tuple(sharded_dims)


def _digest(tensor: Tensor) -> str:
    import torch

    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().data).hexdigest()
