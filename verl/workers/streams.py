"""Weights on their way between the ranks of a role."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from verl.models.shards import load_model_shards, model_shards
from verl.shard import Shard
from verl.training.engine import TrainEngine
from verl.training.ranks import gather_json
from verl.workers.place import ROLE, Place


def gathered(pieces: Iterable[Shard], group: Any) -> Iterator[Shard]:
    """Whole tensors, at every rank of a group, from the pieces that its ranks hold (some may hold none).

    All ranks draw in step. What every rank holds whole does not travel. None for `group`: the pieces are whole.
    """
    if group is None:
        yield from pieces
        return
    own = {(piece.name, piece.offset): piece for piece in pieces}
    held = [
        (p.name, p.global_shape, p.offset, tuple(p.tensor.shape), str(p.tensor.dtype).removeprefix("torch."))
        for p in own.values()
    ]
    blocks: dict[str, list[_Block]] = {}
    for rank, found in zip(dist.get_process_group_ranks(group), gather_json(held, group), strict=True):
        for name, shape, offset, size, dtype in found:
            block = _Block(rank, tuple(shape), tuple(offset), tuple(size), getattr(torch, dtype))
            blocks.setdefault(name, []).append(block)
    for name, holders in blocks.items():
        whole = [block for block in holders if block.size == block.shape]
        if len(whole) == dist.get_world_size(group):
            yield own[name, whole[0].offset]
            continue
        once = {block.offset: block for block in reversed(whole[:1] or holders)}
        tensor = _broadcast([*once.values()], name, own, group)
        yield Shard.whole(name, tensor)


class _Block(NamedTuple):
    """A part of a tensor, and a rank that holds it."""

    rank: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype


def _broadcast(
    blocks: list[_Block], name: str, own: Mapping[tuple[str, tuple[int, ...]], Shard], group: Any
) -> torch.Tensor:
    """The whole of a tensor, put together from blocks that each come from the rank that holds them."""
    whole = torch.empty(blocks[0].shape, dtype=blocks[0].dtype, device=_device(group))
    for block in blocks:
        part = whole[tuple(slice(low, low + size) for low, size in zip(block.offset, block.size, strict=True))]
        if block.rank == dist.get_rank():
            part.copy_(own[name, block.offset].tensor)
        moved = part if part.is_contiguous() else part.contiguous()
        dist.broadcast(moved, block.rank, group=group)
        if moved is not part:
            part.copy_(moved)
    return whole


def _device(group: Any) -> Any:
    return torch.cuda.current_device() if "nccl" in dist.get_backend(group) else "cpu"


def equal_weights(model: torch.nn.Module, place: Place) -> None:
    """Give every rank of a role the first trainer's weights: a model that each rank has made for itself may differ."""
    if place.size == 1:
        return
    is_source = place.rank == place.trainer
    stream = gathered(model_shards(model) if is_source else (), place.groups[ROLE])
    if is_source:
        deque(stream, maxlen=0)
    else:
        load_model_shards(model, stream)


def spread_weights(engine: TrainEngine, place: Place) -> None:
    """Give the ranks of a role that only generate the trained weights."""
    trains = "train" in place.meshes
    stream = gathered(engine.shards() if trains else (), place.groups[ROLE])
    if trains:
        deque(stream, maxlen=0)
    else:
        engine.load_shards(stream)
