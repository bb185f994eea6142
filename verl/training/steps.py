"""From the losses of a mini-batch to one step of the optimizer, and the optimizer's state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from verl._host.device import return_free_memory
from verl.algorithms.loss_terms import Loss, LossTerm
from verl.errors import TrainingError
from verl.training.local_weights import LocalWeights
from verl.training.optimizer import MixedPrecisionOptimizer
from verl.training.runner import DEPENDS, NO_GRADIENT, Metrics, MicroBatchRunner
from verl.weights.shard import Shard, Stream


class Steps(Protocol):
    """How an engine trains; the methods are those of `TrainEngine`."""

    def update(self, parts: Sequence[LossTerm]) -> Metrics: ...
    def state(self) -> tuple[Iterable[Shard], dict[str, Any]]: ...
    def load_state(self, shards: Iterable[Shard], meta: Mapping[str, Any]) -> None: ...
    def free_gradients(self) -> None: ...
    def refresh_masters(self) -> None:
        """Masters anew from the live weights, after these have been replaced from outside."""


def nothing_to_compute(parts: Sequence[LossTerm]) -> bool:
    """Whether there are rows, and all of them are left out. Every rank is given the same parts, so all ranks agree."""
    return any(len(part.rows) for part in parts) and not any(part.computed for part in parts)


class OptimizerSteps:
    """Steps of our own optimizer, on gradient sums that are added up over ranks once a step."""

    def __init__(self, runner: MicroBatchRunner, optimizer: MixedPrecisionOptimizer, weights: LocalWeights) -> None:
        self.optimizer = optimizer
        self.free_gradients, self.refresh_masters = optimizer.gradients.free, optimizer.refresh_masters
        self._runner, self._weights = runner, weights

    def update(self, parts: Sequence[LossTerm]) -> Metrics:
        optimizer, on_cpu = self.optimizer, self._runner.forward.packed.device.type == "cpu"
        if not on_cpu:  # else all is there
            optimizer.move(to_host=False)
        try:
            return self._step(self._losses(parts))
        finally:
            optimizer.gradients.clear()
            if self._runner.options.fsdp_config.optimizer_offload:
                optimizer.move(to_host=True)
                optimizer.gradients.free()
            if on_cpu:
                return_free_memory()

    def _losses(self, parts: Sequence[LossTerm]) -> list[Loss]:
        """The losses of this rank's micro-batches; the gradient sums are those of all ranks then."""
        gradients = self.optimizer.gradients
        if nothing_to_compute(parts):
            gradients.fill_zeros()
            return []
        with gradients.collecting():
            losses = self._runner.backward(parts, gradients.loss_scale)
        for reduce in self._runner.parallel.reductions:
            reduce(gradients)
        return losses

    def _step(self, losses: Sequence[Loss]) -> Metrics:
        gradients = self.optimizer.gradients
        metrics, grad_norm, lr = self._runner.metrics(losses), self._grad_norm(), self.optimizer.lr
        depends = metrics.pop(DEPENDS, True)  # absent where all ranks have nothing to compute
        if not gradients.any() or not depends:
            raise TrainingError(NO_GRADIENT)
        # Loss and norm are those of all ranks, equal on each. So either all of them step or none does; a rank that
        # judged by its own gradient would leave the others with other weights.
        skipped = not (math.isfinite(metrics["loss"]) and math.isfinite(grad_norm))
        if skipped:
            gradients.rejected()
        else:
            self.optimizer.step(grad_norm)
        return {**metrics, "grad_norm": grad_norm, "lr": lr, "update/skipped": float(skipped)}

    def _grad_norm(self) -> float:
        """The norm of the gradient over the shards of all ranks; each element counts once."""
        norm = self.optimizer.gradients.norm(self._runner.parallel.copies)
        if not self._runner.parallel.cut_dims:
            return norm
        square = torch.tensor(norm**2, dtype=torch.float64)
        self._runner.ranks.all_reduce([square], dist.ReduceOp.SUM, *self._runner.parallel.cut_dims)
        return float(square.sqrt())

    def state(self) -> tuple[Iterable[Shard], dict[str, Any]]:
        return Stream(lambda: self._weights.state_shards(self.optimizer.tensors())), self.optimizer.meta()

    def load_state(self, shards: Iterable[Shard], meta: Mapping[str, Any]) -> None:
        self.optimizer.load_state(self._weights.local_state(shards), meta)
