"""Seconds of one model's work on its ranks: training, forward passes, generation, the way of its weights.

Products are bound by FLOP/s, decoding by memory bandwidth, the rest by links. docs/planner.md says what it leaves out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl.models.memory import ModelSize
from verl.planner.hardware import Cluster
from verl.planner.memory import Strategy, shared_by
from verl.weights.layout import Layout

#: Seconds in which a layer's kernels are launched: the least that a layer of one decoding step takes.
LAUNCH = 30e-6


@dataclass(frozen=True)
class Workload:
    """A step of the algorithm.

    Attributes:
        samples: responses of a step, `n` to a prompt.
        prompt, response: tokens; responses are taken to be as long as they may be.
        updates: optimizer steps.
        epochs: times that each response is learned from.
        micro_batch: samples of one.
        max_num_seqs: sequences that one engine generates at the same time.
        old_log_probs: the actor scores its own samples before it is trained.
    """

    samples: int = 1024
    n: int = 1
    prompt: int = 1024
    response: int = 1024
    updates: int = 8
    epochs: int = 1
    micro_batch: int = 1
    checkpointing: bool = False
    max_num_seqs: int = 1024
    old_log_probs: bool = False

    @property
    def length(self) -> int:
        return self.prompt + self.response


@dataclass(frozen=True)
class Generation:
    """How one engine of `tp` ranks generates. `together`: sequences at a time, in `waves` one after the other."""

    tp: int
    together: int
    waves: int
    prefill: float
    decode: float
    transition: float = 0.0

    @property
    def seconds(self) -> float:
        return self.transition + self.prefill + self.decode


@dataclass(frozen=True)
class Costs:
    """Seconds on a cluster, for a workload."""

    cluster: Cluster
    work: Workload

    def train(self, size: ModelSize, strategy: Strategy, layout: Layout) -> float:
        """All optimizer steps of one step of the algorithm."""
        samples = self.work.samples * self.work.epochs / self.work.updates
        each = self.passes(size, strategy, layout, samples, backward=True)
        share = size.parameters / shared_by(strategy, layout, "optimizer")
        # A step reads and writes masters, moments and gradients, and writes the weights.
        touched = share * (2 * (strategy.gradients + strategy.optimizer) + strategy.weights)
        step = touched / self.cluster.device.host if strategy.offloaded else self.cluster.read(touched)
        parking = 2 * share * strategy.optimizer / self.cluster.device.host if strategy.parked else 0.0
        return self.work.updates * (each + self._sum_gradients(size, strategy, layout) + step) + parking

    def generate(
        self, size: ModelSize, ranks: int, tp: int, free: float, batch: int | None = None
    ) -> Generation | None:
        """Generation by engines of `tp` ranks each; None: there is no room for one sequence.

        Args:
            free: bytes of each rank for keys and values.
            batch: samples that are generated at a time, whatever there is room for (None: as many as fit).
        """
        work, engines = self.work, ranks // tp
        rows = math.ceil(work.samples / engines)
        kv = size.kv_bytes_per_token(tp)
        # Samples of one prompt share its keys and values.
        room = int(free / (kv * (work.prompt / work.n + work.response)))
        together = min(room, work.max_num_seqs, rows, batch or rows)
        if together < 1:
            return None
        waves = math.ceil(rows / together)
        together = math.ceil(rows / waves)
        prompts = math.ceil(rows / work.n) * work.prompt
        prefill = self.cluster.compute(prompts * self._flops(size, work.prompt) / tp)
        prefill += self._tensor_sums(size, prompts, tp, size.layers)
        past = together * (work.prompt / work.n + work.response / 2) * kv
        read = self.cluster.read(size.weight_bytes / tp + past)
        product = self.cluster.compute(2 * size.parameters * together / tp)
        step = max(read, product, size.layers * LAUNCH) + self._tensor_sums(size, together, tp, size.layers)
        return Generation(tp, together, waves, prefill, waves * work.response * step)

    def transition(self, size: ModelSize, strategy: Strategy, layout: Layout, tp: int) -> tuple[float, float]:
        """(bytes that a rank receives, seconds) of the hybrid engine: one gather inside the group of ranks whose
        training shards make up one generation shard. Where FSDP's rows become tensor-parallel columns, of which each
        rank has a part, the group is all ranks that hold training shards."""
        whole = size.parameters * size.itemsize
        shards = layout.tp * layout.pp
        dims = [(layout.pp, layout.data_size * layout.tp), (max(1, layout.tp // tp), 1)]
        across = 0.0
        if strategy.gathers:
            shards *= layout.data_size
            if tp > layout.tp:
                columns = size.layers * size.hidden * (size.heads * size.head_dim + size.intermediate)
                across = min(1.0, columns / size.parameters)
        held = (1 - across + across * layout.tp / tp) / shards

        rows = (layout.data_size * min(layout.tp, tp) // tp, max(layout.tp, tp))
        seconds = 0.0
        for share, sharded in ((1 - across, rows), (across, (layout.data_size, layout.tp))):
            if share:
                seconds += self.cluster.gather(share * whole / tp, *dims, *[sharded] * strategy.gathers)
        return whole * (1 / tp - held), seconds

    def passes(self, size: ModelSize, strategy: Strategy, layout: Layout, samples: float, *, backward: bool) -> float:
        """Forward (and backward) passes over `samples`, dealt to the data-parallel ranks, in a pipeline."""
        rows = math.ceil(samples / layout.data_size)
        work, micro = self.work, min(self.work.micro_batch, rows)
        count, tokens = math.ceil(rows / micro), micro * self.work.length
        stage = math.ceil(size.layers / layout.pp)
        forwards = (4 if work.checkpointing else 3) if backward else 1
        flops = tokens * self._flops(size, work.length) / (layout.tp * layout.pp)
        weights = size.weight_bytes / (layout.tp * layout.pp)
        compute = forwards * max(self.cluster.compute(flops), self.cluster.read(weights))
        # The backward pass sums activations over tensor-parallel ranks as often as a forward pass does.
        sums = (2 + work.checkpointing if backward else 1) * self._tensor_sums(size, tokens, layout.tp, stage)
        wire = 0.0
        if strategy.gathers:
            group = (layout.data_size, layout.tp)
            count_gathered = size.parameters / (layout.tp * layout.pp)
            wire = (2 if backward else 1) * self.cluster.gather(strategy.wire[0] * count_gathered, group)
            wire += self.cluster.gather(strategy.wire[1] * count_gathered, group) if backward else 0.0
        each = max(compute + sums, wire)  # a layer is gathered while the one before is computed
        if layout.pp > 1:
            passed = tokens * size.hidden * size.itemsize
            each += (1 + backward) * self.cluster.send(passed, layout.data_size * layout.tp)
        return (count + layout.pp - 1) * each

    def _sum_gradients(self, size: ModelSize, strategy: Strategy, layout: Layout) -> float:
        """Once an optimizer step, over data-parallel ranks that do not cut their gradients."""
        if strategy.gathers or layout.data_size == 1:
            return 0.0
        group, count = (layout.data_size, layout.tp), size.parameters / (layout.tp * layout.pp)
        # Gradients are summed in shards; then these are gathered, or the weights that were stepped with them.
        back = strategy.wire[0 if "optimizer" in strategy.cut else 1]
        return self.cluster.gather(count * strategy.wire[1], group) + self.cluster.gather(count * back, group)

    def _flops(self, size: ModelSize, length: int) -> float:
        """Operations of a token's forward pass in a sequence of `length`: products with weights, causal attention."""
        return 2 * size.parameters + 2 * size.layers * size.heads * size.head_dim * length

    def _tensor_sums(self, size: ModelSize, tokens: float, tp: int, layers: int) -> float:
        """Two sums of activations a layer over tensor-parallel ranks, of one forward pass."""
        # An all-reduce is a reduce-scatter and an all-gather.
        return 2 * layers * 2 * self.cluster.gather(tokens * size.hidden * size.itemsize, (tp, 1)) if tp > 1 else 0.0
