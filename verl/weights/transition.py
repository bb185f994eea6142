"""One rank's part in a resharding plan: it sends shards, receives those it lacks, and fills its buffers (`Transfer`).
`HybridWeights`, the generation weights of a rank, are filled so from the training engines of all ranks, and freed after
the rollout.

While they are filled, no byte of a training shard is held twice: what lies within this rank's part of the
generation weights is copied there (from memory to memory, no rank is asked) and its own memory is freed, until
`release` copies it back.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl._base.names import check_known
from verl.errors import BrokenCollectiveError, ConfigError, TrainingError
from verl.weights.layout import Mesh
from verl.weights.plan import BUCKET_BYTES, ReshardPlan, SliceTransfer, transition
from verl.weights.shard import Shard, local_part, sharded_dims_of
from verl.weights.shards import HeldShards

if TYPE_CHECKING:
    from verl.training.engine import TrainEngine

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
        staged: the most bytes that messages took at a time.
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
        self._shards = HeldShards(iter(shards))
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
            transfer.local.of(self._buffers[transfer.name]).copy_(self._shards.find(transfer.name, transfer.slice))
        peers = sorted({*incoming, *outgoing, self._rank})
        here, operations = peers.index(self._rank), []
        messages: dict[Any, Tensor] = {}
        for step in range(1, len(peers)):  # each rank gives to one and receives from one other at a time
            to, source = peers[(here + step) % len(peers)], peers[here - step]
            if to in outgoing:
                key = tuple(transfer[:2] for transfer in outgoing[to])
                if key not in messages:
                    parts = [self._shards.find(transfer.name, transfer.slice) for transfer in outgoing[to]]
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


def _by_peer(transfers: Iterable[SliceTransfer], side: str) -> dict[int, list[SliceTransfer]]:
    by_peer: dict[int, list[SliceTransfer]] = {}
    for transfer in transfers:
        by_peer.setdefault(getattr(transfer, side), []).append(transfer)
    return by_peer


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class HybridWeights:
    """A rank's part of the weights in the generation layout. All ranks make one, and `start` it, together.

    Args:
        engine: of this rank, which trains.
        target: the ranks that generate, such as `verl.weights.layout.generation_mesh` lays them out.
        group: a process group of all ranks of both meshes, used for nothing else meanwhile; its timeout is the deadline
            of each wait.
        targets: the parameters of a generation model by checkpoint name, laid out over `target`. Nothing else may use
            their memory. None: `buffers` are made, cut as training cuts them.
        overlap: on a CPU, `start` returns at once, and a thread moves the weights. (On an accelerator the calling
            thread issues the transfer, which its stream runs.)
        bucket_bytes: see `transition`.

    Attributes:
        plan: what moves.
        buffers: this rank's part of each weight by checkpoint name. The tensors are made once, so that a model can be
            bound to them; they have memory from `start` to `release`.
        transfer: the last one.

    Raises:
        ConfigError: the layouts or the tensors do not go together.
    """

    def __init__(
        self,
        engine: TrainEngine,
        target: Mesh,
        group: Any,
        targets: Mapping[str, Tensor] | None = None,
        *,
        overlap: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.engine, self.group = engine, group
        self.rank = dist.get_rank()
        specs = engine.weights.specs
        if targets is not None:
            check_known("transition: the generation model has no weight", specs, targets)
        sharded_dims = None if targets is None else {name: sharded_dims_of(targets[name]) for name in specs}
        self.plan = transition(engine.mesh, target, specs, sharded_dims, bucket_bytes)
        sources = (shard.tensor for shard in engine.shards()) if targets is None else map(local_part, targets.values())
        device = next((source.device for source in sources), torch.device("cpu"))
        self.buffers: dict[str, Tensor] = {}
        for name in self.plan.names(self.rank):
            shape, dtype = self.plan.local_shape(self.rank, name), specs[name].dtype
            if targets is None:
                buffer = torch.empty(shape, dtype=dtype, device=device)
            else:
                buffer = local_part(targets[name].detach())
                if tuple(buffer.shape) != shape or buffer.dtype != dtype:
                    raise ConfigError(
                        f"transition: '{name}' has the local shape {list(buffer.shape)} in {buffer.dtype} in the "
                        f"generation model, {list(shape)} in {dtype} was expected"
                    )
            self.buffers[name] = buffer
        self._sizes = {name: buffer.untyped_storage().nbytes() for name, buffer in self.buffers.items()}
        self._device, self._overlap = device, overlap and device.type == "cpu"
        backend: Any = group._get_backend(group._device_types[0])
        self._deadline: float = backend.options._timeout.total_seconds()
        present = Counter[str]()  # elements of this rank's shards in the target that it has already
        for transfer in chain(*self.plan.incoming(self.rank)):
            present[transfer.name] += transfer.slice.numel * (transfer.source == self.rank)
        held = {name: sum(block.slice.numel for block in self.plan.held(self.rank, name)) for name in self.buffers}
        #: Weights whose training shard on this rank lies within its generation part.
        self._within = {name for name, count in present.items() if count and count == held[name]}
        self._thread: threading.Thread | None = None
        #: By bucket, from `start` to `release`: done when its weights are in place.
        self._arrived: list[Future[None]] | None = None
        self._released: set[str] = set()
        self.transfer: Transfer | None = None
        for name in self.buffers:
            self._resize(name, 0)

    def start(self) -> None:
        """Begin to fill the buffers with the weights as they are now. All ranks of the plan call it.

        Raises:
            TrainingError: they are filled already.
        """
        if self._arrived is not None:
            raise TrainingError("the generation weights are there already: release() them before the next transfer")
        self._arrived = [Future() for _ in self.plan.buckets]
        if self._overlap:
            self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
            self._thread.start()
        else:
            self._run()

    def ready(self, name: str) -> Tensor:
        """Wait until the weight `name` is there, and return this rank's part of it.

        Raises:
            TrainingError: the transfer failed.
            BrokenCollectiveError: it did not go on within the deadline.
        """
        self._wait(self.plan.last[name])
        return self.buffers[name]

    def wait(self) -> None:
        """Wait until all weights are there.

        Raises:
            TrainingError: see `ready`.
        """
        self._wait(len(self.plan.buckets) - 1)
        if self._thread is not None:
            self._thread.join(self._deadline)

    def shards(self) -> Iterator[Shard]:
        """This rank's part of the generation weights, on the live buffers."""
        for name, buffer in self.buffers.items():
            yield from self._shards_of(name, buffer if self._arrived is None else self.ready(name))

    def release(self) -> None:
        """Give the training engine its shards back, and free the buffers."""
        if self._thread is not None:
            self._thread.join(self._deadline * max(1, len(self.plan.buckets)))
            self._thread = None
        for name, buffer in self.buffers.items():
            if name in self._released:
                self.engine.weights.restore(name, self._shards_of(name, buffer))
                self._released.discard(name)
            self._resize(name, 0)
        self._arrived = None

    def _run(self) -> None:
        try:
            held, calls = self.engine.shards(), (self._begin, self._end)
            self.transfer = Transfer(self.plan, self.rank, self.group, held, self.buffers, self._device, *calls)
            self.transfer.run()
        except BaseException as error:
            for arrived in self._arrived or ():
                if not arrived.done():
                    arrived.set_exception(error)

    def _wait(self, bucket: int) -> None:
        if self._arrived is None:
            raise TrainingError("the generation weights were released: start() the transfer first")
        for number, arrived in enumerate(self._arrived[: bucket + 1]):
            try:
                error = arrived.exception(self._deadline)
            except TimeoutError:
                raise BrokenCollectiveError(
                    f"the transfer of weights did not go on within {self._deadline:g} s, at bucket {number} of "
                    f"{len(self.plan.buckets)}: a rank is missing or very slow"
                ) from None
            if error is not None:
                raise TrainingError(f"the transfer of weights failed: {error}") from error

    def _begin(self, number: int) -> None:
        for item in self.plan.buckets[number]:
            if item.name in self.buffers:
                self._resize(item.name, self._sizes[item.name])

    def _end(self, number: int) -> None:
        # A training shard may go once nothing reads it any more, after the last bucket with a part of its weight, and
        # if all of it lies in this rank's buffer: what lies elsewhere could not be given back from here (`release`).
        for item in self.plan.buckets[number]:
            is_due = (
                self.plan.last[item.name] == number and item.name in self._within and item.name not in self._released
            )
            if is_due and self.engine.weights.release(item.name):
                self._released.add(item.name)
        if self._arrived is not None:
            self._arrived[number].set_result(None)

    def _resize(self, name: str, size: int) -> None:
        # The storage is resized, and no tensor is made anew: the generation model's parameters, recorded graphs and
        # views of parts hold these very tensors, and must see the memory come and go.
        storage = self.buffers[name].untyped_storage()
        if storage.nbytes() != size:  # resizing moves the memory even to the same size
            storage.resize_(size)

    def _shards_of(self, name: str, buffer: Tensor) -> Iterator[Shard]:
        for block in self.plan.blocks(self.rank, name):
            yield Shard(name, self.plan.specs[name].shape, block.slice.offset, block.local.of(buffer))
