"""Pipeline parallelism: stages of layers on different ranks, and micro-batches that pass through them.

Training runs one forward, one backward (1F1B; Narayanan et al. 2021, arXiv 2104.04473): stage s of n begins n - s
micro-batches before it takes the first back, and then one for each that comes back, so that no rank keeps the
activations of more than n. All ranks of a pipeline are given the same rows, so a stage knows the shape of what it
receives, and micro-batches of different sizes need no padding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from verl.algorithms.loss_terms import Loss
from verl.attention.segments import Packed
from verl.errors import ConfigError
from verl.training.forward import Forward
from verl.training.gradients import Gradients
from verl.training.parallel.stages import Stage, StageSplit
from verl.training.ranks import Parallel, Ranks
from verl.training.runner import MicroBatch


def stages(forward: Forward, count: int, *, trains: bool) -> StageSplit:
    """How the model is cut.

    Raises:
        ConfigError: it is of a kind that cannot be cut, or a stage has nothing to train.
    """
    cut = StageSplit(forward.model, forward.packed, count)
    for number in range(count) if trains else ():
        if not any(weight.requires_grad for weight in cut.parameters(number)):
            raise ConfigError(f"layout: pp={count} leaves stage {number} with nothing to train: its weights are frozen")
    return cut


def pipeline(forward: Forward, ranks: Ranks, parallel: Parallel, *, trains: bool) -> None:
    """Keep the layers of this rank's stage; embeddings stay on the first, the head on the last."""
    count = ranks.mesh.layout.pp
    cut = stages(forward, count, trains=trains)
    tied = cut.parameters(0) & cut.parameters(count - 1)
    parallel.tied = frozenset(name for name, weight in forward.model.named_parameters() if weight in tied)
    schedule = Pipeline(forward, cut.keep(ranks.mesh.coordinate(ranks.rank)["pp"]), ranks)
    parallel.schedule = schedule
    parallel.cut_dims += ("pp",)
    parallel.reductions.append(lambda gradients: schedule.agree(gradients, parallel.tied))


class _Pass(NamedTuple):
    """A micro-batch between its forward and its backward: what entered this stage, what left it, and its loss."""

    incoming: Tensor | None
    root: Tensor
    loss: Loss | None

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """Given the gradient of what left, that of what entered."""
        if self.root.requires_grad:
            torch.autograd.backward(self.root, gradient)
        if self.incoming is None:
            return None
        return torch.zeros_like(self.incoming) if self.incoming.grad is None else self.incoming.grad


class Pipeline:
    """The `Schedule` of one stage."""

    def __init__(self, forward: Forward, stage: Stage, ranks: Ranks) -> None:
        forward.stage = stage
        self._forward, self._stage = forward, stage
        self._ranks, self._group = ranks, ranks.group("pp")
        members = dict(enumerate(ranks.mesh.group(ranks.rank, "pp")))
        self._before, self._after = members.get(stage.number - 1), members.get(stage.number + 1)
        #: The rank of the last stage for the first, and the other way round.
        self._other_end = {0: members[stage.count - 1], stage.count - 1: members[0]}.get(stage.number)
        self._depends = False

    def forward(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Any]:
        for one in micro_batches:
            flat = self._forward.pack(one.batch, one.tree)
            outputs = self._run(one, flat, self._swap(self._before, receive=self._like(flat)))
            if self._stage.is_last:
                yield one.finish(outputs)
            else:
                self._swap(self._after, outputs["hidden"])

    def forward_backward(self, micro_batches: Iterable[MicroBatch], loss_scale: float) -> Iterator[Loss]:
        # Each round swaps once with the stage after (this forward's result, for a gradient that comes back), then once
        # with the stage before (what became of that gradient, for the next input). So two neighbours make equally many
        # swaps, in one order; with sends and receives by themselves both could be in a send, and wait forever.
        self._depends = False
        ahead = self._stage.count - 1 - self._stage.number
        coming = ((one, self._forward.pack(one.batch, one.tree)) for one in micro_batches)
        begun: deque[_Pass] = deque()
        following = next(coming, None)
        incoming = self._swap(self._before, receive=self._like(following and following[1]))
        while following is not None or begun:
            sent = None
            can_end = following is None or len(begun) == ahead
            if following is not None:
                begun.append(self._begin(*following, incoming, loss_scale))
                sent = begun[-1].root
                following = next(coming, None)
            ended = begun.popleft() if can_end else None
            gradient = self._swap(self._after, sent, None if ended is None else torch.empty_like(ended.root))
            back = None
            if ended is not None:
                with self._forward.precision():
                    back = ended.backward(gradient)
            incoming = self._swap(self._before, back, self._like(following and following[1]))
            if ended is not None and ended.loss is not None:
                yield ended.loss

    def agree(self, gradients: Gradients, tied: Collection[str]) -> None:
        """Give weights that the first and the last stage have in common the gradients of both; drop all gradients if
        the loss had none: stages before the last were given zeros then."""
        depends = torch.tensor(float(self._depends))
        self._ranks.all_reduce([depends], dist.ReduceOp.MAX, "pp")
        if not depends:
            gradients.clear()
        if tied and self._other_end is not None:
            gradients.sum_over_ranks(self._reduce_over_ends, [w for w in gradients.weights if w.name in tied])

    def _begin(self, one: MicroBatch, flat: Packed, incoming: Tensor | None, loss_scale: float) -> _Pass:
        if incoming is not None:
            incoming.requires_grad_()
        outputs = self._run(one, flat, incoming)
        if not self._stage.is_last:
            return _Pass(incoming, outputs["hidden"], None)
        loss = one.finish(outputs)
        self._depends |= loss.total.requires_grad
        return _Pass(incoming, loss.total * loss_scale, loss.detached())

    def _run(self, one: MicroBatch, flat: Packed, incoming: Tensor | None) -> dict[str, Tensor]:
        self._stage.incoming = incoming
        with self._forward.precision():
            outputs: dict[str, Tensor] = self._forward(flat, one.want, one.temperature)
        self._stage.incoming = self._stage.outgoing = None
        return outputs if self._stage.is_last else {"hidden": outputs["hidden"].to(self._stage.dtype)}

    def _like(self, flat: Packed | None) -> Tensor | None:
        """Memory for the hidden states of a micro-batch."""
        if flat is None:
            return None
        packed = self._forward.packed
        rows = flat.context.padded_rows().source.shape if self._forward.is_padded else (1, len(flat.tokens))
        return torch.empty(*rows, self._stage.width, dtype=self._stage.dtype, device=packed.device)

    def _swap(self, peer: int | None, send: Tensor | None = None, receive: Tensor | None = None) -> Tensor | None:
        """Send to a neighbour and receive from it at once, in the same order as it does; returns what came."""
        ways = ((dist.isend, send), (dist.irecv, receive))
        if peer is None or (send is None and receive is None):
            return None
        pairs = [
            dist.P2POp(way, tensor.detach().contiguous(), peer, self._group)
            for way, tensor in ways
            if tensor is not None
        ]
        for work in dist.batch_isend_irecv(pairs):
            work.wait()
        return receive

    def _reduce_over_ends(self, tensors: Sequence[Tensor], op: Any) -> None:
        for tensor in tensors:
            other = self._swap(self._other_end, tensor, torch.empty_like(tensor))
            if other is not None:
                tensor.copy_(torch.maximum(tensor, other) if op == dist.ReduceOp.MAX else tensor + other)
