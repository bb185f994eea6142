"""Data parallelism with the whole model on every rank (DDP).

Every rank gets the whole mini-batch and computes its part of it. Losses are additive over counts of the whole
mini-batch, so sums over ranks are all there is to do: of the accumulated gradients, once a step and in full precision,
and of the metrics. Then every rank makes the same optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.batch import Batch
from verl.training.gradients import Gradients
from verl.training.loss import Loss, combine_metrics
from verl.training.micro_batch import balanced
from verl.training.single import SingleEngine

_BUCKET_BYTES = 64 << 20


class DataParallelEngine(SingleEngine):
    """A `TrainEngine` on one of several ranks that all hold the model. `update` and `loss` take the whole mini-batch
    on every rank; `log_probs`, `values` and `scores` whatever rows the rank is given.

    Args:
        model: equal on all ranks.
        group: the process group of the ranks.
        **options: of `SingleEngine`.
    """

    def __init__(self, model: Any, group: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def _micro_batches(self, batch: Batch, coupled: bool = False) -> tuple[list[list[int]], list[list[int]]]:
        rows = balanced(batch, self.ranks, coupled, self.share_prompts)[self.rank]
        return [[rows[index] for index in part] for part in self._split(batch.take(rows), coupled)], []

    def _measured(self, losses: list[Loss]) -> dict[str, float]:
        parts: list[Any] = [None] * self.ranks
        dist.all_gather_object(parts, super()._measured(losses), group=self.group)
        return combine_metrics(parts)

    def _grad_norm(self, gradients: Gradients) -> float:
        gradients.sum_over_ranks(self._all_reduce)
        return super()._grad_norm(gradients)

    def _all_reduce(self, tensors: list[Tensor], kind: str) -> None:
        op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[kind]
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(flat, op, group=self.group)
            for tensor, piece in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(piece.view_as(tensor))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype in runs of bounded size: a collective each costs less than one a tensor."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
