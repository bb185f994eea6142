"""One rank's part in a resharding plan: it sends shards, receives those it lacks, and fills its buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.errors import ConfigError
from verl.weights.plan import ReshardPlan, SliceTransfer
from verl.weights.shard import Shard, Slice
from verl.weights.shards import fill_block

#: Buckets under way at a time: while one is copied to its places the next is on the line.
AHEAD = 2


class Transfer:
    """Runs a plan, bucket after bucket; all ranks of the plan at once.

    Args:
        plan: of the transition.
        rank: this one, in the whole job.
        group: a process group of all ranks of the plan; its timeout is the deadline of each wait.
        shards: what this rank holds, in the order of the plan.
        buffers: this rank's parts in the target by name, to be filled; they need memory when their bucket begins.
        device: where messages lie, on all ranks alike: that of the buffers. Shards may be in host memory.
        begin: called with the number of a bucket before it begins.
        end: called with it when its weights are in place and this rank has sent its shards of them.

    Attributes:
        received, sent: bytes to and from other ranks.
        staged: at most so many bytes of messages were beside the weights.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        group: Any,
        shards: Iterable[Shard],
        buffers: Mapping[str, Tensor],
        device: torch.device,
        begin: Callable[[int], None] = lambda number: None,
        end: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._incoming, self._outgoing = plan.incoming(rank), plan.outgoing(rank)
        self._plan, self._rank, self._group = plan, rank, group
        self._shards = _HeldShards(shards)
        self._buffers, self._device, self._begin, self._end = buffers, device, begin, end
        self.received = self.sent = self.staged = 0

    @torch.no_grad()
    def run(self) -> None:
        """Move everything.

        Raises:
            ConfigError: this rank's shards are not those of the plan.
            RuntimeError: a rank did not answer within the deadline (torch's error).
        """
        under_way: deque[_Bucket] = deque()
        for number in range(len(self._plan.buckets)):
            under_way.append(self._post(number))
            self.staged = max(self.staged, sum(bucket.staged for bucket in under_way))
            if len(under_way) == AHEAD:
                self._finish(under_way.popleft())
        while under_way:
            self._finish(under_way.popleft())

    def _post(self, number: int) -> _Bucket:
        self._begin(number)
        bucket = _Bucket(number)
        incoming, outgoing = _by_peer(self._incoming[number], "source"), _by_peer(self._outgoing[number], "target")
        for transfer in incoming.pop(self._rank, ()):
            transfer.local.of(self._buffers[transfer.name]).copy_(self._shards.find(transfer))
        peers = sorted({*incoming, *outgoing, self._rank})
        here, operations = peers.index(self._rank), []
        messages: dict[Any, Tensor] = {}
        for step in range(1, len(peers)):  # each rank gives to one and receives from one other at a time
            to, source = peers[(here + step) % len(peers)], peers[here - step]
            if to in outgoing:
                key = tuple(transfer[:2] for transfer in outgoing[to])
                if key not in messages:
                    parts = [self._shards.find(transfer) for transfer in outgoing[to]]
                    messages[key] = bucket.message(parts, self._device)
                operations.append(dist.P2POp(dist.isend, messages[key], to, self._group, number))
                self.sent += messages[key].numel()
            if source in incoming:
                slot = bucket.slot([transfer.local.of(self._buffers[transfer.name]) for transfer in incoming[source]])
                operations.append(dist.P2POp(dist.irecv, slot, source, self._group, number))
                self.received += slot.numel()
        bucket.works = dist.batch_isend_irecv(operations) if operations else []
        return bucket

    def _finish(self, bucket: _Bucket) -> None:
        for work in bucket.works:
            work.wait()
        for slot, targets in bucket.unpack:
            start = 0
            for target in targets:
                target.copy_(slot[start : start + target.nbytes].view(target.dtype).view(target.shape))
                start += target.nbytes
        self._shards.drop([name for name, last in self._plan.last.items() if last == bucket.number])
        self._end(bucket.number)


@dataclass
class _Bucket:
    """A bucket whose messages are under way.

    Attributes:
        unpack: messages to come, and the places of their parts.
        staged: bytes of messages.
        keep: sent messages, which must not be freed before they have gone.
    """

    number: int
    works: list[Any] = field(default_factory=list)
    unpack: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)
    staged: int = 0
    keep: list[Tensor] = field(default_factory=list)

    def message(self, parts: Sequence[Tensor], device: torch.device) -> Tensor:
        """The bytes of some tensors one after the other, on a device; of one that lies there in one run, its own
        memory."""
        if len(parts) == 1 and parts[0].is_contiguous() and parts[0].device == device:
            flat = _bytes(parts[0])
        else:
            flat = torch.cat([_bytes(part.to(device).contiguous()) for part in parts])
            self.staged += flat.numel()
        self.keep.append(flat)
        return flat

    def slot(self, targets: list[Tensor]) -> Tensor:
        """Memory for a message: that of the place itself, if it is one that lies in one run."""
        if len(targets) == 1 and targets[0].is_contiguous():
            return _bytes(targets[0])
        flat = torch.empty(sum(target.nbytes for target in targets), dtype=torch.uint8, device=targets[0].device)
        self.unpack.append((flat, targets))
        self.staged += flat.numel()
        return flat


class _HeldShards:
    """The shards of a rank. Its iterator is advanced only as far as it must be: some are made on the way."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        self._coming: Iterator[Shard] = iter(shards)
        self._by_name: dict[str, list[Shard]] = {}

    def find(self, wanted: SliceTransfer) -> Tensor:
        """The slice: a view of one shard, or a copy put together from several.

        Raises:
            ConfigError: this rank does not hold all of it.
        """
        name, where = wanted.name, wanted.slice
        while (block := self._look_up(name, where)) is None:
            shard = next(self._coming, None)
            if shard is None:
                raise ConfigError(
                    f"transition: this rank was expected to hold {list(where.shape)} of '{name}' from "
                    f"{list(where.offset)} on, and does not: its engine cuts weights otherwise than its specs say"
                )
            self._by_name.setdefault(shard.name, []).append(shard)
        return block

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._by_name.pop(name, None)

    def _look_up(self, name: str, wanted: Slice) -> Tensor | None:
        shards = self._by_name.get(name, [])
        for shard in shards:
            if wanted & shard.slice == wanted:
                return wanted.of(shard.tensor, shard.offset)
        if sum((wanted & shard.slice).numel for shard in shards) < wanted.numel:
            return None
        whole = shards[0].tensor.new_empty(wanted.shape)
        for shard in shards:
            fill_block(wanted.offset, whole, shard)
        return whole


def _by_peer(transfers: Iterable[SliceTransfer], side: str) -> dict[int, list[SliceTransfer]]:
    by_peer: dict[int, list[SliceTransfer]] = {}
    for transfer in transfers:
        by_peer.setdefault(getattr(transfer, side), []).append(transfer)
    return by_peer


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
