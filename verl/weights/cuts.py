"""Where the parts of a weight are that is cut over ranks. What cuts it is torch: the weight is a DTensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from verl.weights.shard import Box, ShardedDim


def local_part(tensor: Tensor) -> Tensor:
    """What of a tensor this rank holds, on the same memory. The tensor itself, where it is not cut."""
    cut: Any = tensor
    return cut.to_local() if hasattr(tensor, "placements") else tensor


def blocks_of(tensor: Tensor, local: Tensor | None = None) -> Iterator[tuple[tuple[int, ...], Tensor]]:
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
    for box, part in part_blocks(tuple(tensor.shape), sharded_dims_of(tensor), sizes, coordinate):
        yield box.offset, part.of(local)


class PartBlock(NamedTuple):
    """A block that a part of a tensor is made of: in the tensor, and in the part (of a run: none)."""

    box: Box
    local: Box


def part_blocks(
    shape: tuple[int, ...], sharded_dims: Sequence[ShardedDim], sizes: Mapping[str, int], coordinate: Mapping[str, int]
) -> tuple[PartBlock, ...]:
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
        PartBlock(Box(offset, lengths), Box(start, lengths))
        for offset, start, lengths in (zip(*block, strict=True) if block else ((), (), ()) for block in product(*runs))
    )


def run_blocks(shape: tuple[int, ...], start: int, run: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
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
def _run_blocks(shape: tuple[int, ...], ranks: int, index: int) -> tuple[PartBlock, ...]:
    """The blocks of one of equal runs of a flattened tensor, of which the last may be shorter."""
    total = math.prod(shape)
    each = -(-total // ranks)
    run = torch.empty(max(0, min(each, total - index * each)), device="meta")
    blocks = run_blocks(shape, index * each, run)
    return tuple(PartBlock(Box(offset, tuple(block.shape)), Box((), ())) for offset, block in blocks)


@contextmanager
def local_weights(module: nn.Module, without: str = "") -> Iterator[Tensor | None]:
    """A module has this rank's parts of its weights inside; the weight `without` is zero there, and yielded."""
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
