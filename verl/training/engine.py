"""The contract of a training engine, and what all of them do alike.

Shapes: R response tokens of all rows, row after row; S rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from verl.algorithms.loss_terms import LossTerm
from verl.batch import Batch
from verl.errors import TrainingError
from verl.models.lora import adapters_off, reference_weights, shape_of
from verl.models.packed import PackedModel
from verl.training.forward import Forward
from verl.training.local_weights import LocalWeights
from verl.training.options import EngineOptions, Head, check_training
from verl.training.ranks import Ranks
from verl.training.runner import Metrics, MicroBatchRunner
from verl.training.steps import Steps
from verl.weights.layout import Mesh
from verl.weights.shard import Shard, WeightSpec

#: The weights of a model that is laid out, for one that was made without.
WeightSource = Callable[[Any], Iterable[Shard]]


class TrainEngine(ABC):
    """A model that predicts and learns, and its optimizer, laid out over the ranks of a mesh and seen from one of them.
    The ranks of `mesh` call the same methods in one order. Dropout is off, in training too.

    It is put together from three parts, which each back end makes of its own kind in `assemble`: `runner`, `weights`
    and `steps`.

    Args:
        model: a causal LM, or a value or reward model, whole and equal on all ranks.
        options: how it is trained; without optimizer settings it is only read.
        head: what the model predicts.
        mesh: the ranks that share it.
        group: their process group; None for one rank.
        parts: groups of some of them, see `Ranks`.
        packed: the model (or its backbone) as a `PackedModel`, if there is one already.
        weights: for a model without weights (`verl.weights.meta`): those of a model, once it is laid out, of which the
            parts that are kept here are read.
        device: where the weights of such a model go.

    Attributes:
        model: as it is laid out.
        mesh: the ranks that share it.
        runner: from rows to predictions, losses and metrics.
        weights: this rank's part of the weights.
        steps: from losses to steps of the optimizer, and its state; None: the model is only read.
        has_auxiliary_loss: the model adds a loss of its own to gradients, such as one that balances experts. None of
            the engines here has one.

    Raises:
        ConfigError: there is nothing to train, the model has no gradient checkpointing, or the layout does not go with
            the model or the optimizer.
    """

    model: Any
    runner: MicroBatchRunner
    weights: LocalWeights
    steps: Steps | None = None
    has_auxiliary_loss: ClassVar[bool] = False

    def __init__(
        self,
        model: Any,
        options: EngineOptions,
        *,
        head: Head = "lm",
        mesh: Mesh | None = None,
        group: Any = None,
        parts: Mapping[tuple[int, ...], Any] | None = None,
        packed: PackedModel | None = None,
        weights: WeightSource | None = None,
        device: str | None = None,
    ) -> None:
        self.model, self.mesh = model, mesh or Mesh()
        forward = Forward(model, head, packed, options, device)
        check_training(options, self.mesh.layout, shape_of(model), **forward.asked())
        ranks = Ranks(self.mesh, group, parts)
        model.eval()
        if options.use_torch_compile:
            forward.compile_layers()
        if options.gradient_checkpointing:
            from verl.training.checkpointing import enable_checkpointing

            enable_checkpointing(forward.packed.model)
        self.assemble(forward, ranks, options, weights)
        #: What the reference of adapters reads beside the base.
        self._first = reference_weights(self.model) if options.trains and head == "lm" else {}

    @abstractmethod
    def assemble(self, forward: Forward, ranks: Ranks, options: EngineOptions, source: WeightSource | None) -> None:
        """Lay the model of `forward` out over the ranks, read its weights from `source` where it has none, and make
        `runner`, `weights` and, of a model that is trained, `steps`."""

    @property
    def precision(self) -> torch.dtype:
        """The dtype of losses and predictions: fp32, or fp64 for an fp64 model."""
        return self.runner.precision

    @torch.no_grad()
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
        self.weights.check_present()
        with nullcontext() if adapters else adapters_off(self.model, self._first):
            return self.runner.predict(batch, want, temperature)

    def update(self, parts: Sequence[LossTerm]) -> Metrics:
        """One optimizer step on the sum of all parts' losses. Cutting it into micro-batches never changes the gradient.

        Every rank is given all parts with the rows of all ranks, and computes those of its data-parallel index. A rank
        that has no rows of a part takes part in its collectives nevertheless. Rows that are left out are computed by
        none; where they are all, no rank runs a forward pass, and the optimizer steps on a gradient of zeros.

        Returns:
            `loss`, `grad_norm` (before clipping), `lr`, `update/skipped` and the losses' own metrics; metrics of one
            name add up over parts (`/max`: the maximum). `update/skipped` is 1.0 where the loss or the gradient was not
            finite: then weights, moments and schedule are as they were.

        Raises:
            DataError: no part has rows, or columns, weights and rows do not fit together.
            TrainingError: the engine has no optimizer, or no loss depends on the model.
        """
        self.weights.check_present()
        return self._trained().update(parts)

    @torch.no_grad()
    def loss(self, parts: Sequence[LossTerm]) -> Metrics:
        """`loss` and the losses' own metrics, as `update` returns them, without a step."""
        self.weights.check_present()
        return self.runner.loss(parts)

    def specs(self) -> dict[str, WeightSpec]:
        """Every weight of the model, by checkpoint name; equal on all ranks."""
        return dict(self.weights.specs)

    def shards(self) -> Iterator[Shard]:
        """This rank's pieces of the weights: the live tensors, unless these are wider than `specs`. No collectives."""
        self.weights.check_present()
        return self.weights.shards()

    def merged_shards(self) -> Iterator[Shard]:
        """The weights of the equal model without adapters, under its names, for an engine that is not cut."""
        self.weights.check_present()
        return self.weights.merged()

    def load_shards(self, shards: Iterable[Shard]) -> None:
        """Replace this rank's pieces (and their masters) by what of them is in `shards`, however those are cut.

        Raises:
            CheckpointError: a weight is unknown, has another shape, or did not come whole.
        """
        self.weights.check_present()
        self.weights.load(shards)
        if self.steps is not None:
            self.steps.refresh_masters()

    def release_weight(self, name: str) -> int:
        """Free the memory of this rank's piece of a weight, whose values the caller holds from now on; until
        `restore_weights`, whatever needs the weights raises `TrainingError`.

        Returns:
            Bytes freed; 0 where it keeps the piece: the live one is wider than `specs`, or shares its memory.
        """
        return self.weights.release(name)

    def restore_weights(self, name: str, shards: Iterable[Shard]) -> None:
        """Put a released weight, all shards of it, back to where it was.

        Raises:
            CheckpointError: a piece did not come whole.
        """
        self.weights.restore(name, shards)

    def state(self) -> tuple[Iterable[Shard], dict[str, Any]]:
        """Optimizer state: this rank's pieces of the tensors "<weight name>.<state>", and JSON values. Each piece is
        made as it is drawn, and may be the live one: draw them, as often as needed, before the next step."""
        self.weights.check_present()
        return self._trained().state()

    @torch.no_grad()
    def load_state(self, shards: Iterable[Shard], meta: Mapping[str, Any]) -> None:
        """Copy in what `state` returned, however it is cut; after `load_shards` of the same moment, steps continue bit
        for bit.

        Raises:
            CheckpointError: it is of another optimizer, model or dtype, or incomplete.
        """
        self._trained().load_state(shards, meta)

    def free_gradients(self) -> None:
        """Free the memory of gradient sums until the next `update`."""
        if self.steps is not None:
            self.steps.free_gradients()

    def _trained(self) -> Steps:
        if self.steps is None:
            raise TrainingError("this model is only read: make its engine with `optim` to train it")
        return self.steps
