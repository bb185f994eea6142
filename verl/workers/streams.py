"""Weights from the ranks that train to the ranks that only generate."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from verl.shard import Shard
from verl.training.engine import TrainEngine
from verl.workers.place import ROLE, Place


def spread_weights(engine: TrainEngine, place: Place, *, to_all: bool = False) -> None:
    """Give the ranks of a role that only generate the weights of the first one that trains; `to_all`: the others that
    train too."""
    trains = "train" in place.shares
    stream = broadcast_shards(engine.shards() if trains else None, place.trainer, place.groups[ROLE])
    if place.rank == place.trainer or (trains and not to_all):
        deque(stream, maxlen=0)
    else:
        engine.load_shards(stream)


def broadcast_shards(stream: Iterator[Shard] | None, source: int, group: Any) -> Iterator[Shard]:
    """The stream of rank `source` of a group, at every rank of it. All ranks draw in step; those that have a stream of
    their own draw it along, because gathering a shard may take all of them."""
    first = dist.get_global_rank(group, source)
    is_source = dist.get_rank(group) == source
    device = torch.cuda.current_device() if "nccl" in dist.get_backend(group) else "cpu"
    while True:
        shard = next(stream, None) if stream is not None else None
        about: list[Any] = [None]
        if is_source and shard is not None:
            t = shard.tensor
            about = [(shard.name, shard.global_shape, shard.offset, tuple(t.shape), t.dtype)]
        dist.broadcast_object_list(about, first, group=group)
        if about[0] is None:
            return
        name, shape, offset, size, dtype = about[0]
        if is_source and shard is not None:
            tensor = shard.tensor.contiguous()
        else:
            tensor = torch.empty(size, dtype=dtype, device=device)
        dist.broadcast(tensor, first, group=group)
        yield Shard(name, shape, offset, tensor)
