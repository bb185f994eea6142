"""Bytes of one rank: what training keeps, what a step adds, what generation needs.

Activations are counted: the tensors that the backward of a layer with gated MLP and rotary attention keeps (other
layers keep less), or of a fused layer of a Llama-shaped model on CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from verl.models.memory import CPU, HeadSizes, ModelSize
from verl.weights.layout import Layout

#: Share of a device's memory that its runtime, communication buffers and fragmentation take.
RESERVE = 0.08


@dataclass(frozen=True)
class Strategy:
    """How ranks share training: bytes a weight takes, and which parts are sharded over data-parallel ranks.

    Attributes:
        wire: bytes of a weight that is gathered to be computed with, and of its gradient that is summed.
        offloaded: shards, moments and gradients are kept and stepped in host memory.
        parked: between updates moments and masters lie in host memory, and there are no gradients.
    """

    name: str
    weights: float
    gradients: float
    optimizer: float
    cut: frozenset[str] = frozenset()
    wire: tuple[float, float] = (2.0, 4.0)
    offloaded: bool = False
    parked: bool = False

    @property
    def gathers(self) -> bool:
        """Whether a layer is gathered each time it is computed."""
        return "weights" in self.cut


ALL = frozenset({"weights", "gradients", "optimizer"})


def ddp(itemsize: int = 2, fp32_moments: bool = False) -> Strategy:
    """This project's: of bf16 weights the low half of their masters is kept apart, and moments are in bf16."""
    full = max(4, itemsize)
    moments = 2 * (full if fp32_moments else itemsize)
    return Strategy("ddp", itemsize, full, full - itemsize + moments, wire=(itemsize, 4))


def fsdp(itemsize: int = 2, *, offloaded: bool = False, parked: bool = False) -> Strategy:
    """This project's: shards are in fp32, and are the masters."""
    full = max(4, itemsize)
    return Strategy("fsdp", full, full, 2 * full, ALL, wire=(itemsize, 4), offloaded=offloaded, parked=parked)


def shared_by(strategy: Strategy, layout: Layout, part: str) -> int:
    """Over how many ranks a part of the training state is sharded."""
    data = layout.shard if strategy.gathers else layout.data_size
    return layout.tp * layout.pp * (data if part in strategy.cut else 1)


@dataclass(frozen=True)
class Usage:
    """Bytes of one model on one rank.

    Attributes:
        kept: always there, by part.
        step: there during an optimizer step, or a forward pass of a model that is only read, by part.
        parked: the kept bytes that are in host memory while the model is not updated.
        host: bytes in host memory, at some time.
    """

    kept: dict[str, float] = field(default_factory=dict)
    step: dict[str, float] = field(default_factory=dict)
    parked: float = 0.0
    host: float = 0.0

    def __str__(self) -> str:
        parts = [f"{name} {amount / 1e9:.2f}" for name, amount in {**self.kept, **self.step}.items() if amount]
        return f"{self.peak / 1e9:.2f} GB ({', '.join(parts)})"

    @property
    def resting(self) -> float:
        """While another model, or generation, works."""
        return sum(self.kept.values()) - self.parked

    @property
    def peak(self) -> float:
        """While it works itself, without other models."""
        return sum(self.kept.values()) + sum(self.step.values())


def estimate(
    size: ModelSize,
    strategy: Strategy,
    layout: Layout,
    tokens: int = 0,
    *,
    checkpointing: bool = False,
    trained: bool = True,
    head: HeadSizes = CPU,
) -> Usage:
    """The memory of a model that is trained, or only read, on each of its ranks.

    Args:
        tokens: of a micro-batch.
        checkpointing: activations are computed again in the backward pass.
        head: sizes of the device.
    """
    count, stage = size.parameters, math.ceil(size.layers / layout.pp)
    gathered = 0.0
    if strategy.gathers:  # the unit that computes and the next one; the largest is the embedding with the head
        layer = (count - size.vocab * size.hidden) / size.layers
        gathered = strategy.wire[0] * max(2 * layer, size.vocab * size.hidden) / (layout.tp * layout.pp)
    vocab = size.vocab / layout.tp
    logits = float(head.work_bytes(tokens * vocab, vocab * size.hidden, size.itemsize))
    # Of a layer, for its backward: a norm keeps its input in fp32, its normalised input and its output. Tensor
    # parallelism cuts attention and MLP, but not the norms.
    norms = 2 * size.hidden * (size.itemsize if size.fused else 4 + 2 * size.itemsize)
    wide = 2 * (size.heads + size.kv_heads) * size.head_dim + (2 if size.fused else 4) * size.intermediate
    per_layer = tokens * (norms + wide * size.itemsize / layout.tp)
    if not trained:
        weights = size.weight_bytes / shared_by(strategy, layout, "weights")
        return Usage({"weights": weights}, {"activations": per_layer, "head": logits, "gathered": gathered})
    trainable = count if size.trained is None else size.trained  # of LoRA the adapters alone
    whole = {
        "weights": count * strategy.weights + size.int4_bytes,
        "gradients": trainable * strategy.gradients,
        "optimizer": trainable * strategy.optimizer,
    }
    kept = {part: amount / shared_by(strategy, layout, part) for part, amount in whole.items()}
    host = kept["optimizer"] if strategy.parked else 0.0
    if strategy.offloaded:
        host, kept = sum(kept.values()), dict.fromkeys(kept, 0.0)
    inputs = tokens * size.hidden * size.itemsize
    # One forward, one backward: the first stage holds as many micro-batches as there are stages.
    # Gradients inside of a layer: of the norms' inputs, of gate, up and their product.
    inside = tokens * (2 * size.hidden + 3 * size.intermediate / layout.tp) * size.itemsize
    activations = layout.pp * (stage * inputs + per_layer if checkpointing else stage * per_layer)
    parked = kept["gradients"] + kept["optimizer"] if strategy.parked else 0.0
    return Usage(kept, {"activations": activations, "head": max(logits, inside), "gathered": gathered}, parked, host)
