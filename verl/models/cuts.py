"""Where the parts of a weight are that is cut over ranks. What cuts it is torch: the weight is a DTensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn


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
    for runs in product(*(_runs(_kept(tensor, dim)) for dim in range(tensor.dim()))):
        block = local
        for dim, (at, _, length) in enumerate(runs):
            block = block.narrow(dim, at, length)
        yield tuple(start for _, start, _ in runs), block


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
    inner, at = math.prod(shape[1:]), 0
    while left := len(run) - at:
        row, within = divmod(start + at, inner)
        if within or left < inner:  # a part of one row
            size = min(inner - within, left)
            for offset, block in run_blocks(shape[1:], within, run[at : at + size]):
                yield (row, *offset), block[None]
        else:
            size = left - left % inner
            yield (row, *(0,) * (len(shape) - 1)), run[at : at + size].view(-1, *shape[1:])
        at += size


@contextmanager
def local_weights(module: nn.Module, without: str = "") -> Iterator[Tensor | None]:
    """A module has this rank's parts of its weights inside; the weight `without` is zero there, and yielded."""
    own = dict(module._parameters)
    module._parameters.update({name: local_part(weight) for name, weight in own.items() if weight is not None})  # type: ignore[misc]
    removed = own.get(without)
    if removed is not None:
        module._parameters[without] = torch.zeros_like(removed)  # type: ignore[assignment]
    try:
        yield removed
    finally:
        module._parameters.update(own)


def _kept(tensor: Any, dim: int) -> Tensor:
    """Indices of a dimension of a DTensor that this rank has, in the order in which it has them."""
    kept, pieces = torch.arange(tensor.shape[dim]), 1
    mesh = tensor.device_mesh
    # Inner mesh dimensions are cut first: FSDP cuts what tensor parallelism has left.
    for size, at, cut in reversed([*zip(mesh.shape, mesh.get_coordinate(), tensor.placements, strict=True)]):
        if getattr(cut, "dim", None) == dim:
            fused = getattr(cut, "split_factor", pieces) // pieces
            kept = torch.cat([(*part.chunk(size), *[part[:0]] * size)[at] for part in kept.chunk(fused)])
            pieces *= size
    return kept


def _runs(kept: Tensor) -> list[tuple[int, int, int]]:
    """Indices as runs of neighbours: place of the first, the first, length."""
    if not len(kept):
        return []
    breaks = (kept.diff() != 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()]
    return [(a, int(kept[a]), b - a) for a, b in pairwise([*starts, len(kept)])]


def cuts_of(tensor: Tensor) -> tuple[tuple[str, int], ...]:
    """How a tensor is cut over the ranks of a mesh, as `WeightSpec.cuts`."""
    cut: Any = tensor
    if not hasattr(tensor, "placements"):
        return ()
    named = [*zip(cut.device_mesh.mesh_dim_names, cut.placements, strict=True)]
    return tuple((name, placement.dim) for name, placement in reversed(named) if hasattr(placement, "dim"))
