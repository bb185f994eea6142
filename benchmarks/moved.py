"""What a transition of weights moves and holds, in bytes: counted from its plan, or while it runs."""

from __future__ import annotations

import time
from collections import Counter
from typing import NamedTuple

from verl.weights.layout import DIMS, Layout, Mesh, transition_shares
from verl.weights.plan import ReshardPlan
from verl.weights.transition import HybridWeights


class Moved(NamedTuple):
    """Bytes of one rank: what it receives, what of its target part it holds already, its parts in target and source."""

    received: int
    own: int
    target: int
    source: int


def moved_bytes(plan: ReshardPlan, rank: int, *, cut_alone: bool = False) -> Moved:
    """What the transition is for a rank, in bytes.

    Args:
        cut_alone: of the weights that source or target cuts over `tp`, `ep` or `shard`, and of all weights of a source
            with stages.
    """
    names = {name for name in plan.specs if not cut_alone or is_cut(plan, name)}
    received = own = 0
    for region in (region for bucket in plan.incoming(rank) for region in bucket if region.name in names):
        size = region.slice.numel * plan.specs[region.name].dtype.itemsize
        received, own = (received, own + size) if region.source == rank else (received + size, own)
    held = sum(
        block.slice.numel * spec.dtype.itemsize
        for spec in plan.specs.values()
        if spec.name in names
        for block in plan.held(rank, spec.name)
    )
    return Moved(received=received, own=own, target=received + own, source=held)


def is_cut(plan: ReshardPlan, name: str) -> bool:
    """Whether ranks of the source have different parts of a weight, or some have none."""
    spec = plan.specs[name]
    return bool(spec.sharded_dims) or 0 < len(spec.stages) < plan.source.layout.pp


def micro_groups(train: Mesh, generation: Mesh) -> list[tuple[int, ...]]:
    """The micro data-parallel groups: ranks with the same part of the weights in generation, out of one replica of
    training; each group in the order of the generation replicas."""
    groups: dict[tuple[int, ...], list[int]] = {}
    gathered = ("pp", "tp", *(("shard",) if train.layout.shard > 1 else ()))
    for rank in generation.ranks:
        trains, generates = train.coordinate(rank), generation.coordinate(rank)
        key = (generates["pp"], generates["tp"], *(trains[dim] for dim in DIMS if dim not in gathered))
        groups.setdefault(key, []).append(rank)
    return [*map(tuple, groups.values())]


class PaperColumn(NamedTuple):
    """What each rank receives, holds at most, and holds twice, as shares of the bytes of the weights."""

    received: float
    peak: float
    redundant: float


def paper_table(train: Layout, generation: Layout) -> dict[str, PaperColumn]:
    """Table 2 of the paper for weights that tensor and pipeline parallelism cut evenly. With FSDP the pieces are
    smaller by `shard`, and so much more is received.

    Returns:
        `all ranks`: gathering over all of them (DeepSpeed-Chat); `model-parallel group`: over tensor and pipeline
        ranks (HybridFlow-V; with FSDP over the shards too); `ours`.
    """
    pieces = train.pp * train.tp * train.shard
    ranks = pieces * train.replicate
    return {
        "all ranks": PaperColumn((ranks - 1) / ranks, 1.0, 1 / ranks),
        "model-parallel group": PaperColumn((pieces - 1) / pieces, 1.0, 1 / pieces),
        "ours": PaperColumn(*transition_shares(train, generation), 0.0),
    }


class MeasuredWeights(HybridWeights):
    """Generation weights that count what is moved and held.

    Attributes:
        received, sent: bytes of the last transfer from and to other ranks.
        staged: bytes of its messages.
        peak: bytes that weights and messages took at most: buffers, training pieces that were there too, and staging.
        spans: of each bucket, when it began and was in place (seconds, `time.perf_counter`).
        redundant: bytes of training pieces that were held twice once all was filled.
    """

    received = sent = staged = peak = redundant = 0

    def start(self) -> None:
        self.spans: list[tuple[float, float]] = []
        self._begun: list[float] = []
        self._pieces = self.peak = sum(shard.nbytes for shard in self.engine.shards())
        #: Bytes of the training shards here, and of this rank's shards in the target that it has already.
        self._held_bytes, self._own_bytes = Counter[str](), Counter[str]()
        sizes = {name: spec.dtype.itemsize for name, spec in self.plan.specs.items()}
        for name in self.buffers:
            self._held_bytes[name] = sum(b.slice.numel * sizes[name] for b in self.plan.held(self.rank, name))
        for transfer in (one for bucket in self.plan.incoming(self.rank) for one in bucket if one.source == self.rank):
            self._own_bytes[transfer.name] += transfer.slice.numel * sizes[transfer.name]
        super().start()

    def _run(self) -> None:
        super()._run()
        assert self.transfer is not None
        self.received, self.sent, self.staged = self.transfer.received, self.transfer.sent, self.transfer.staged
        self.peak += self.staged
        own = {name: size for name, size in self._own_bytes.items() if name not in self._released}
        self.redundant = sum(min(size, self._held_bytes[name]) for name, size in own.items())

    def _begin(self, number: int) -> None:
        self._begun.append(time.perf_counter())
        super()._begin(number)
        buffers = sum(buffer.untyped_storage().nbytes() for buffer in self.buffers.values())
        self.peak = max(self.peak, buffers + self._pieces - sum(self._held_bytes[name] for name in self._released))

    def _end(self, number: int) -> None:
        super()._end(number)
        self.spans.append((self._begun[number], time.perf_counter()))
