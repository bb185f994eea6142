"""The order in which the micro-batches of a step go forward and backward.

A model in one piece takes one after the other; a pipeline (parallel/pipeline.py) has several under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from verl.algorithms.loss_terms import Loss
from verl.batch import Batch
from verl.training.forward import Forward


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward.

    Attributes:
        want: the predictions to make of them.
        finish: turns the predictions into the result of the micro-batch: a `Loss`, or anything.
    """

    batch: Batch
    want: tuple[str, ...]
    temperature: float
    finish: Callable[[dict[str, Tensor]], Any]


class Schedule(Protocol):
    """How this rank runs the micro-batches of its rows. Results come in their order."""

    def forward(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Any]:
        """What `finish` returns for each; nothing on a rank without the model's head."""

    def forward_backward(self, micro_batches: Iterable[MicroBatch], loss_scale: float) -> Iterator[Loss]:
        """The losses, detached, after the backward pass of each times `loss_scale`."""


class OneStage:
    """One micro-batch after the other, through the whole model."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def forward(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Any]:
        for one in micro_batches:
            with self._forward.precision():
                outputs = self._forward(self._forward.pack(one.batch), one.want, one.temperature)
            yield one.finish(outputs)

    def forward_backward(self, micro_batches: Iterable[MicroBatch], loss_scale: float) -> Iterator[Loss]:
        for loss in self.forward(micro_batches):
            if loss.total.requires_grad:
                with self._forward.precision():
                    (loss.total * loss_scale).backward()
            yield loss.detached()
