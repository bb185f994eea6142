"""Weights on their way between the ranks of a role."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from verl.cluster.rank_context import ROLE, RankContext
from verl.training.ranks import gather_json
from verl.weights.shard import Shard, split_large
from verl.weights.shards import HeldShards, whole_weights


def broadcast_shards(shards: Iterable[Shard], group: Any) -> Iterator[Shard]:
    """Yield the weights that the ranks of a group hold in shards (some may hold none) at every rank: one shard of
    bounded size at a time, weight by weight.

    All ranks iterate in step. Weights that every rank holds whole are not sent.

    Args:
        shards: of this rank; iterated twice, so that shards made on demand are in memory one at a time.
        group: None: the shards are whole.
    """
    if group is None:
        yield from shards
        return
    if isinstance(shards, Iterator):
        shards = [*shards]
    outlines = [
        (p.name, p.global_shape, p.offset, tuple(p.tensor.shape), str(p.tensor.dtype).removeprefix("torch."))
        for p in shards
    ]
    holders: dict[str, list[tuple[int, Shard]]] = {}
    for rank, held in zip(dist.get_process_group_ranks(group), gather_json(outlines, group), strict=True):
        for name, shape, offset, size, dtype in held:
            outline = torch.empty(size, dtype=getattr(torch, dtype), device="meta")
            holders.setdefault(name, []).append((rank, Shard(name, tuple(shape), tuple(offset), outline)))
    # Every rank goes through the weights in the order of the gathered outlines, which is equal on all of them, whatever
    # order its own shards come in: a broadcast matches the call that its peers make at the same time, not a name. Of
    # equal shards the rank listed first sends.
    held_here = HeldShards(iter(shards))
    for name, held_by in holders.items():
        whole = [(rank, shard) for rank, shard in held_by if shard.is_whole]
        if len(whole) == dist.get_world_size(group):
            yield replace(whole[0][1], tensor=held_here.find(name, whole[0][1].slice))
            held_here.drop([name])
            continue
        by_offset = {shard.offset: (rank, shard) for rank, shard in reversed(whole[:1] or held_by)}
        for rank, shard in reversed(by_offset.values()):
            is_here = rank == dist.get_rank()
            sent = replace(shard, tensor=held_here.find(name, shard.slice)) if is_here else shard
            for part in split_large([sent]):
                # A shard of the sender may be in host memory.
                device = torch.cuda.current_device() if "nccl" in dist.get_backend(group) else "cpu"
                moved = part.tensor.to(device).contiguous() if is_here else torch.empty_like(part.tensor, device=device)
                dist.broadcast(moved, rank, group=group)
                yield replace(part, tensor=moved)
        held_here.drop([name])


def gathered(shards: Iterable[Shard], group: Any) -> Iterator[Shard]:
    """`broadcast_shards`, with each weight whole.

    Args:
        shards, group: see `broadcast_shards`.
    """
    return whole_weights(broadcast_shards(shards, group))


def spread(shards: Iterable[Shard] | None, context: RankContext, load: Callable[[Iterable[Shard]], None]) -> None:
    """Broadcast the shards of the ranks of a role that have some, and `load` them on the others."""
    stream = broadcast_shards(shards or (), context.groups[ROLE])
    if shards is None:
        load(stream)
    else:
        deque(stream, maxlen=0)
