"""The contract of a training engine: one model, and its optimizer, under some layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor
from typing_extensions import Unpack

from verl.batch import Batch
from verl.shard import Shard
from verl.training.loss import LossFn, LossNeeds


class TrainEngine(Protocol):
    """A model that predicts, and learns.

    Batches have the columns `prompt_tokens` and `response_tokens`; results are flat over the response tokens
    of all rows in order (`[R]`) or one number a row (`[S]`), in fp32 (fp64 for an fp64 model), on the host.
    """

    def log_probs(self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False) -> dict[str, Tensor]:
        """`{"log_probs": [R]}`, and `"entropy": [R]` in nats if asked for; no gradient."""
        ...

    def values(self, batch: Batch) -> Tensor:
        """`[R]`: the value of the state before each response token; no gradient."""
        ...

    def scores(self, batch: Batch) -> Tensor:
        """`[S]`: one score a row, read at its last token; no gradient."""
        ...

    def update(self, batch: Batch, loss_fn: LossFn, *, weights: Tensor, **needs: Unpack[LossNeeds]) -> dict[str, float]:
        """One optimizer step over a mini-batch, cut into micro-batches that fit; no cut changes the gradient.

        Args:
            batch: the mini-batch.
            loss_fn: from the record of a micro-batch to its additive loss.
            weights: `[R]` aggregation weights over the mini-batch on all ranks.
            columns: what the loss reads; those the batch lacks are absent from `LossInput.columns`.
            temperature: log-probs are of logits divided by it.
            entropy: whether the loss reads entropies.
            coupled: rows of one `group` meet in one micro-batch.

        Returns:
            `loss`, `grad_norm` (before clipping), `lr`, `update/skipped` and the loss's own metrics.
            `update/skipped` is 1.0 when the loss or the gradient was not finite: then weights, moments and
            schedule are as they were.
        """
        ...

    def loss(self, batch: Batch, loss_fn: LossFn, *, weights: Tensor, **needs: Unpack[LossNeeds]) -> dict[str, float]:
        """`loss` and the loss's own metrics, as `update` has them, of the weights as they are; nothing is learned."""
        ...

    def shards(self) -> Iterator[Shard]:
        """The live weights under their checkpoint names."""
        ...

    def load_shards(self, shards: Iterable[Shard]) -> None:
        """Replace the live weights (and their masters) in place."""
        ...

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Optimizer state: tensors "<weight name>.<state>" and JSON values. References, not copies."""
        ...

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Copy in what `state` returned; with the shards of the same moment, steps go on bit for bit."""
        ...

    def offload(self) -> None:
        """Free the device of optimizer state and gradients until the next `onload` or `update`."""
        ...

    def onload(self) -> None: ...
