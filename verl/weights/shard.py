"""A piece of a weight under its Hugging Face checkpoint name: the one currency of weights.

One stream of shards feeds every sink: checkpoint, export, engine sync, resharding, checksum.
Tied weights occur once in a stream; a sink that needs the alias (an engine's `lm_head.weight`) expands it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

#: Bytes of shards that travel as one object.
BUNCH = 64 << 20


class Box(NamedTuple):
    """A block of a weight: the index where it begins, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __and__(self, other: Box) -> Box:
        """What both have in common; without elements if that is nothing."""
        low = tuple(map(max, self.offset, other.offset))
        high = (min(a + m, b + n) for a, m, b, n in zip(*self, *other, strict=True))
        return Box(low, tuple(max(0, end - start) for start, end in zip(low, high, strict=True)))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, tensor: torch.Tensor, offset: Sequence[int] = ()) -> torch.Tensor:
        """The block of a weight, or of a part of it that begins at `offset`, on the same memory."""
        for dim, (start, here, size) in enumerate(zip(self.offset, offset or repeat(0), self.shape, strict=False)):
            tensor = tensor.narrow(dim, min(start - here, tensor.shape[dim]), size)
        return tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """`tensor` is the block of the weight `name` (of `global_shape`) that begins at `offset`, one index a dimension."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> Shard:
        return cls(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)

    @property
    def is_whole(self) -> bool:
        return tuple(self.tensor.shape) == self.global_shape

    @property
    def box(self) -> Box:
        return Box(self.offset, tuple(self.tensor.shape))

    @property
    def is_inside(self) -> bool:
        """Whether the block lies in the weight."""
        return self.box & Box((0,) * len(self.offset), self.global_shape) == self.box

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
    shape: tuple[int, ...]
    dtype: torch.dtype
    sharded_dims: tuple[ShardedDim, ...] = ()
    stages: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Stream(Iterable[Shard]):
    """Shards that are made as they are drawn, anew each time.

    Args:
        begin: begins the stream.
    """

    def __init__(self, begin: Callable[[], Iterator[Shard]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Shard]:
        return self._begin()


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


def _digest(tensor: torch.Tensor) -> str:
    import torch

    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().data).hexdigest()
