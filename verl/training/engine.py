"""The contract of a training engine: one model, and its optimizer, laid out over the ranks of a mesh.

Shapes: R response tokens of all rows, row after row; S rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from verl.algorithms.loss_terms import LossPart
from verl.batch import Batch
from verl.weights.layout import Mesh
from verl.weights.shard import Shard, WeightSpec

#: What can be moved out of the way: `optimizer` (masters and moments, to host memory) and `gradients` (their sums,
#: freed).
Memory: TypeAlias = Literal["optimizer", "gradients"]
Metrics: TypeAlias = dict[str, float]


class TrainEngine(Protocol):
    """A model that predicts and learns, seen from one rank. The ranks of `mesh` call the same methods in one order.

    Attributes:
        mesh: the ranks that share the model.
        precision: dtype of losses and predictions: fp32, or fp64 for an fp64 model.
    """

    @property
    def mesh(self) -> Mesh: ...
    @property
    def precision(self) -> torch.dtype: ...

    def predict(
        self, batch: Batch, want: Collection[str], *, temperature: float = 1.0, adapters: bool = True
    ) -> dict[str, Tensor]:
        """Predictions for this rank's rows, without gradient.

        Args:
            batch: with `prompt_tokens` and `response_tokens`; the rows of this rank's data-parallel index.
            want: "log_probs" and "entropy" (language-model head), "values" (value head), "scores" (score head).
            temperature: log-probs and entropies are of logits divided by it.
            adapters: False: predictions of the base model, without its adapters (LoRA).

        Returns:
            By name, in `precision`, on the host: `log_probs` of the response tokens, `entropy` in nats of the
            distributions they were drawn from, `values` of the states before them (all `[R]`); `scores` `[S]`, read at
            the last token of each row.

        Raises:
            TrainingError: the model has no head for a prediction.
            DataError: a token or position is outside of the model's tables.
        """
        ...

    def update(self, parts: Sequence[LossPart]) -> Metrics:
        """One optimizer step on the sum of all parts' losses. Cutting it into micro-batches never changes the gradient.

        Every rank is given all parts with the rows of all ranks, and computes those of its data-parallel index. A rank
        that has no rows of a part takes part in its collectives nevertheless.

        Returns:
            `loss`, `grad_norm` (before clipping), `lr`, `update/skipped` and the losses' own metrics; metrics of one
            name add up over parts (`/max`: the maximum). `update/skipped` is 1.0 where the loss or the gradient was not
            finite: then weights, moments and schedule are as they were.

        Raises:
            DataError: no part has rows, or columns, weights and rows do not fit together.
            TrainingError: the engine has no optimizer, or no loss depends on the model.
        """
        ...

    def loss(self, parts: Sequence[LossPart]) -> Metrics:
        """`loss` and the losses' own metrics, as `update` returns them, without a step."""
        ...

    def specs(self) -> Mapping[str, WeightSpec]:
        """Every weight of the model, by checkpoint name; equal on all ranks."""
        ...

    def shards(self) -> Iterator[Shard]:
        """This rank's pieces of the weights: the live tensors, unless these are wider than `specs`. No collectives."""
        ...

    def merged_shards(self) -> Iterator[Shard]:
        """The weights of the equal model without adapters, under its names, for an engine that is not cut."""
        ...

    def load_shards(self, shards: Iterable[Shard]) -> None:
        """Replace this rank's pieces (and their masters) by what of them is in `shards`, however those are cut.

        Raises:
            CheckpointError: a weight is unknown, has another shape, or did not come whole.
        """
        ...

    def release_weight(self, name: str) -> int:
        """Free the memory of this rank's piece of a weight, whose values the caller holds from now on; until
        `restore_weights`, whatever needs the weights raises `TrainingError`.

        Returns:
            Bytes freed; 0 where it keeps the piece: the live one is wider than `specs`, or shares its memory.
        """
        ...

    def restore_weights(self, name: str, shards: Iterable[Shard]) -> None:
        """Put a lent weight, all pieces of it, back to where it was.

        Raises:
            CheckpointError: a piece did not come whole.
        """
        ...

    def state(self) -> tuple[Iterable[Shard], dict[str, Any]]:
        """Optimizer state: this rank's pieces of the tensors "<weight name>.<state>", and JSON values. Each piece is
        made as it is drawn, and may be the live one: draw them, as often as needed, before the next step."""
        ...

    def load_state(self, shards: Iterable[Shard], meta: Mapping[str, Any]) -> None:
        """Copy in what `state` returned, however it is cut; after `load_shards` of the same moment, steps continue bit
        for bit.

        Raises:
            CheckpointError: it is of another optimizer, model or dtype, or incomplete.
        """
        ...

    def offload(self, what: Collection[Memory] = ("optimizer", "gradients")) -> None:
        """Free the device of it until `onload` or the next `update`."""
        ...

    def onload(self, what: Collection[Memory] = ("optimizer", "gradients")) -> None: ...
