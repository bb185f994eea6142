"""The contract of a training engine, and what every engine does alike: predictions and losses of micro-batches, and one
optimizer step on the sum of their gradients.

    update -> partition -> for each micro-batch: forward, loss, backward -> reductions over ranks -> optimizer.step

Shapes: R response tokens of all rows, row after row; S rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from verl._host.device import glibc
from verl.algorithms.loss_terms import Loss, LossTerm, combine_metrics
from verl.attention.prefix_tree import PrefixTree
from verl.batch import Batch
from verl.errors import ConfigError, DataError, TrainingError
from verl.kernels.inductor import lacking
from verl.models.lora import adapters_off, merged_shards, reference_weights, shape_of
from verl.models.packed import PackedModel
from verl.training.forward import Forward, enable_checkpointing, recomputing
from verl.training.micro_batch import Limits, MiniBatch, partition
from verl.training.optimizer import MixedPrecisionOptimizer
from verl.training.options import EngineOptions, Head, check_training
from verl.training.ranks import LocalWeights, Parallel, Ranks, gather_json
from verl.weights.layout import DATA_DIMS, Mesh
from verl.weights.shard import Shard, Stream

Metrics: TypeAlias = dict[str, float]
#: The weights of a model that is laid out, for one that was made without.
WeightSource = Callable[[Any], Iterable[Shard]]

#: The row of an empty micro-batch, which a rank runs for the sake of the others' collectives.
IDLE = Batch.from_columns({"prompt_tokens": [[0]], "response_tokens": [[0]]})
#: Key in the metrics of a backward pass: how many losses with rows depend on what the model predicts.
DEPENDS = "loss/depends"
NO_GRADIENT = (
    "the loss does not depend on what the model predicts: compute it from log_probs, values or scores, without detach "
    "or no_grad"
)


class MicroBatch(NamedTuple):
    """Rows of one forward.

    Attributes:
        tree: the prefixes that they share.
        want: the predictions to make of them.
        finish: turns the predictions into the result of the micro-batch: a `Loss`, or anything.
    """

    batch: Batch
    tree: PrefixTree | None
    want: tuple[str, ...]
    temperature: float
    finish: Callable[[dict[str, Tensor]], Any]


class Schedule:
    """How this rank runs the micro-batches of its rows: here one after the other, through a model in one piece. Results
    come in their order.

    Args:
        wrapped: `forward` in what calls it for us; None: itself.
    """

    def __init__(self, forward: Forward, wrapped: Any = None) -> None:
        self._forward = forward
        self.wrapped: Any = wrapped or forward

    def forward(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Any]:
        """What `finish` returns for each; nothing on a rank without the model's head."""
        for one in micro_batches:
            with self._forward.precision():
                outputs = self.wrapped(self._forward.pack(one.batch, one.tree), one.want, one.temperature)
            yield one.finish(outputs)

    def forward_backward(self, micro_batches: Iterable[MicroBatch], loss_scale: float) -> Iterator[Loss]:
        """The losses, detached, after the backward pass of each times `loss_scale`."""
        for loss in self.forward(micro_batches):
            if loss.total.requires_grad:
                with self._forward.precision():
                    (loss.total * loss_scale).backward()
            yield loss.detached()


class TrainEngine(ABC):
    """A model that predicts and learns, and its optimizer, laid out over the ranks of a mesh and seen from one of them.
    The ranks of `mesh` call the same methods in one order. Dropout is off, in training too.

    Args:
        model: a causal LM, or a value or reward model, whole and equal on all ranks.
        options: how it is trained; without optimizer settings it is only read.
        head: what the model predicts.
        mesh: the ranks that share it.
        group: their process group; None for one rank.
        parts: groups of some of them, see `Ranks`.
        packed: the model (or its backbone) as a `PackedModel`, if there is one already.
        weights: for a model without weights (`on_meta`): called with it once it is laid out, returns shards, of
            which only this rank's parts are read.
        device: where the weights of such a model go.

    Attributes:
        model: as it is laid out.
        forward: the model as a function of a micro-batch.
        schedule: the order in which micro-batches go forward and backward.
        limits: bounds on a micro-batch.
        shares_prefixes: prefixes that rows share are computed once.
        weights: this rank's part of the weights.
        optimizer: None: the model is only read.
        has_auxiliary_loss: the model adds a loss of its own to gradients, such as one that balances experts. None of
            the engines here has one.

    Raises:
        ConfigError: there is nothing to train, the model has no gradient checkpointing, or the layout does not go with
            the model or the optimizer.
    """

    parallel: Parallel
    weights: LocalWeights
    optimizer: Any = None
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
        self.model, self.mesh, self.options = model, mesh or Mesh(), options
        self.forward = forward = Forward(model, head, packed, options, device)
        check_training(options, self.mesh.layout, shape_of(model), **forward.asked())
        self.ranks = Ranks(self.mesh, group, parts)
        model.eval()
        if options.use_torch_compile:
            if (lack := lacking(forward.packed.device.type)) is not None:
                raise ConfigError(f"use_torch_compile: {lack}")
            forward.packed.compile_layers()
        if options.gradient_checkpointing:
            enable_checkpointing(forward.packed.model)
        #: The dtype of losses and predictions.
        self.precision = torch.float64 if forward.packed.dtype == torch.float64 else torch.float32
        self.assemble(weights)
        self.schedule: Schedule = self.parallel.schedule or Schedule(forward)
        # Padded rows (as for stateful models) share no prefixes.
        self.shares_prefixes, is_packed = options.share_prompts and not forward.is_padded, not forward.is_padded
        most = options.max_tokens_per_micro_batch, options.micro_batch_size
        self.limits = Limits(*most, options.share_prompts, is_packed)
        #: What the reference of adapters reads beside the base.
        self._first = reference_weights(self.model) if options.trains and head == "lm" else {}

    @abstractmethod
    def assemble(self, source: WeightSource | None) -> None:
        """Lay the model out over the ranks, load its weights from `source` if given, and set `parallel`, `weights` and,
        if the model is trained, `optimizer`."""

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
            distributions they were sampled from, `values` of the states before them (all `[R]`); `scores` `[S]`, read
            at the last token of each row.

        Raises:
            TrainingError: the model has no head for a prediction.
            DataError: a token or position is outside of the model's tables.
        """
        self.weights.check_present()
        names = tuple(want)
        if unknown := sorted({*names} - {*self.forward.predicts}):
            raise TrainingError(
                f"this engine has a head of kind '{self.forward.head}', which predicts "
                f"{' and '.join(self.forward.predicts)}, not {', '.join(unknown)}"
            )
        self.forward.check_batch(batch)
        lengths = [1] * len(batch) if self.forward.head == "score" else batch.lengths("response_tokens")
        batch = batch.drop(["response_mask"])  # all tokens are predicted
        (split,), tree = partition(batch, range(len(batch)), 1, self.limits)
        if self.parallel.lockstep:
            most = torch.tensor(len(split))  # forwards of the rank with the most
            self.ranks.all_reduce([most], dist.ReduceOp.MAX, DATA_DIMS)
            split += [[]] * (int(most) - len(split))
        micro_batches = (
            MicroBatch(*_taken(batch, tree, rows), names, temperature, lambda outputs: outputs) for rows in split
        )
        predicted = {name: torch.empty(sum(lengths), dtype=self.precision) for name in names}
        by_row = {name: values.split(lengths) for name, values in predicted.items()}
        with nullcontext() if adapters else adapters_off(self.model, self._first):
            # Not strict: a pipeline stage without the head runs every micro-batch and yields nothing; it gets the
            # predictions of the last stage below. Empty micro-batches have no rows to fill.
            for outputs, rows in zip(self.schedule.forward(micro_batches), split, strict=False):
                for name in names if rows else ():
                    values = outputs[name].cpu().split([lengths[row] for row in rows])
                    for row, of_row in zip(rows, values, strict=True):
                        by_row[name][row].copy_(of_row)
        if (stages := self.ranks.group("pp")) is not None:
            last = self.mesh.group(self.ranks.rank, "pp")[-1]
            for values in predicted.values():
                dist.broadcast(values, last, group=stages)
        return predicted

    def update(self, parts: Sequence[LossTerm]) -> Metrics:
        """One optimizer step on the sum of all parts' losses. Cutting it into micro-batches never changes the gradient.

        Every rank gets all parts with the rows of all ranks, and computes the rows of its data-parallel index. A rank
        without rows of a part still joins its collectives. No rank computes skipped rows; if all rows are skipped, no
        rank runs a forward pass, and the optimizer steps on a gradient of zeros.

        Returns:
            `loss`, `grad_norm` (before clipping), `lr`, `update/skipped` and the losses' own metrics; metrics of one
            name add up over parts (`/max`: the maximum). `update/skipped` is 1.0 where the loss or the gradient was not
            finite: then weights, moments and schedule are as they were.

        Raises:
            DataError: no part has rows, or columns, weights and rows do not fit together.
            TrainingError: the engine has no optimizer, or no loss depends on the model.
        """
        self.weights.check_present()
        optimizer: MixedPrecisionOptimizer = self._trained()
        gradients, on_cpu = optimizer.gradients, self.forward.packed.device.type == "cpu"
        if not on_cpu:  # else all is there
            optimizer.move(to_host=False)
        try:
            losses: list[Loss] = []
            if self.skips_all(parts):
                gradients.fill_zeros()
            else:
                # `backward` leaves no gradient in `.grad`: each goes into the fp32 sum of its weight as it is computed,
                # by our own functions or by a hook, so that one weight's exists at a time.
                with gradients.collecting():
                    losses = self.backward(parts, gradients.loss_scale)
                # The sums are of this rank's rows, stage and heads until here.
                for reduce in self.parallel.reductions:
                    reduce(gradients)
            return self._step(optimizer, losses)
        finally:
            gradients.clear()
            if self.options.fsdp_config.optimizer_offload:
                optimizer.move(to_host=True)
                gradients.free()
            if on_cpu:
                # Tensors of an update have sizes of their own: freed memory in pieces between others would let the
                # heap grow for dozens of steps.
                glibc("malloc_trim", 0)

    def _step(self, optimizer: MixedPrecisionOptimizer, losses: Sequence[Loss]) -> Metrics:
        gradients, lr = optimizer.gradients, optimizer.lr
        metrics, depends = self.metrics(losses)
        grad_norm = gradients.norm(self.parallel.replication)
        if dims := self.parallel.cut_dims:  # each element counts once
            square = torch.tensor(grad_norm**2, dtype=torch.float64)
            self.ranks.all_reduce([square], dist.ReduceOp.SUM, dims)
            grad_norm = float(square.sqrt())
        if not depends or not any(weight.has_gradient for weight in gradients.weights):
            raise TrainingError(NO_GRADIENT)
        # Loss and norm are those of all ranks, equal on each. So either all of them step or none does; a rank that
        # judged by its own gradient would leave the others with other weights.
        skipped = not (math.isfinite(metrics["loss"]) and math.isfinite(grad_norm))
        if skipped:
            gradients.rejected()
        else:
            optimizer.step(grad_norm)
        return {**metrics, "grad_norm": grad_norm, "lr": lr, "update/skipped": float(skipped)}

    def skips_all(self, parts: Sequence[LossTerm]) -> bool:
        """Whether there are rows, and all of them are skipped. Every rank has the same parts, so all ranks agree."""
        return any(len(part.rows) for part in parts) and not any(part.computed for part in parts)

    def backward(self, parts: Sequence[LossTerm], loss_scale: float) -> list[Loss]:
        """The losses of this rank's micro-batches, after the backward pass of each times `loss_scale`. Their metrics
        have `DEPENDS`."""
        with recomputing(self.forward.model) if self.options.gradient_checkpointing else nullcontext():
            return [*self.schedule.forward_backward(self._micro_batches(parts), loss_scale)]

    @torch.no_grad()
    def loss(self, parts: Sequence[LossTerm]) -> Metrics:
        """`loss` and the losses' own metrics, as `update` returns them, without a step."""
        self.weights.check_present()
        return self.metrics([*self.schedule.forward(self._micro_batches(parts))])[0]

    def metrics(self, losses: Sequence[Loss]) -> tuple[Metrics, bool]:
        """`loss` and metrics of the micro-batches of all ranks, and whether any loss depends on the predictions."""
        here = combine_metrics([loss.metrics for loss in losses])
        here["loss"] = sum(float(loss.total) for loss in losses)
        metrics = combine_metrics(gather_json(here, self.ranks.group("pp", *DATA_DIMS)))
        return metrics, bool(metrics.pop(DEPENDS, True))  # absent where all ranks have nothing to compute

    def _micro_batches(self, parts: Sequence[LossTerm]) -> Iterator[MicroBatch]:
        """The micro-batches of this rank, part after part, with their losses."""
        if not any(len(part.rows) for part in parts):
            raise DataError("the mini-batch has no rows: there is nothing to train on")
        for part in (part for part in parts if part.computed):
            self.forward.check_batch(part.rows)
            mini_batch = MiniBatch(part, self.precision)
            want = self.forward.wanted(part.needs)
            # Every rank is given the rows of all and takes its own: then totals and the partition need no
            # communication, and no rank can be given another one's rows.
            coupled, lockstep = part.needs.coupled, self.parallel.lockstep
            index, size = self.mesh.rows(self.ranks.rank) or (0, 1)
            split, tree = partition(part.rows, part.computed, size, self.limits, coupled=coupled, lockstep=lockstep)
            for rows in split[index]:
                batch, taken = _taken(part.rows, tree, rows)
                finish = partial(self._loss, mini_batch, rows, batch) if rows else no_loss
                yield MicroBatch(batch, taken, want, part.needs.temperature, finish)

    def _loss(self, mini_batch: MiniBatch, rows: list[int], batch: Batch, outputs: dict[str, Tensor]) -> Loss:
        """The loss of a micro-batch. In training its metrics say whether it depends on the predictions. In lockstep it
        has a backward pass in any case: a micro-batch without rows has one too, and would wait in it for this rank."""
        loss = mini_batch.loss(rows, batch, outputs)
        if not torch.is_grad_enabled():
            return loss
        depends = loss.total.requires_grad
        total = loss.total if depends or not self.parallel.lockstep else loss.total + no_loss(outputs).total
        return Loss(total=total, metrics={**loss.metrics, DEPENDS: float(depends)})

    def shards(self) -> Iterator[Shard]:
        """This rank's shards of the weights: the live tensors, unless these are wider than `specs`. No collectives."""
        self.weights.check_present()
        return self.weights.shards()

    def merged_shards(self) -> Iterator[Shard]:
        """The weights of the equal model without adapters, under its names, for an engine that is not cut."""
        self.weights.check_present()
        return merged_shards(self.model)

    def load_shards(self, shards: Iterable[Shard]) -> None:
        """Replace this rank's shards (and their masters) by what of them is in `shards`, however those are cut.

        Raises:
            CheckpointError: a weight is unknown, has another shape, or did not come whole.
        """
        self.weights.check_present()
        self.weights.load(shards)
        if self.optimizer is not None:
            self.optimizer.refresh_masters()

    def state(self) -> tuple[Iterable[Shard], dict[str, Any]]:
        """Optimizer state: this rank's shards of the tensors "<weight name>.<state>", and JSON values. Each shard is
        made as it is read, and may be the live one: read them, as often as needed, before the next step."""
        self.weights.check_present()
        optimizer = self._trained()
        return Stream(lambda: self.weights.state_shards(optimizer.tensors())), optimizer.meta()

    @torch.no_grad()
    def load_state(self, shards: Iterable[Shard], meta: Mapping[str, Any]) -> None:
        """Copy in what `state` returned, however it is cut; after `load_shards` of the same moment, steps continue bit
        for bit.

        Raises:
            CheckpointError: it is of another optimizer, model or dtype, or incomplete.
        """
        self._trained().load_state(self.weights.local_state(shards), meta)

    def _trained(self) -> Any:
        if self.optimizer is None:
            raise TrainingError("this model is only read: make its engine with `optim` to train it")
        return self.optimizer


def no_loss(outputs: dict[str, Tensor]) -> Loss:
    """Nothing, with a gradient of zeros for every weight that the outputs depend on."""
    # A constant 0 would have no backward pass, and FSDP gathers and reduces in that pass: the other ranks, which have
    # rows, would wait for this one forever. So the 0 depends on all outputs.
    return Loss(total=torch.stack([values.sum() for values in outputs.values()]).sum() * 0.0)


def _taken(batch: Batch, tree: PrefixTree, rows: Sequence[int]) -> tuple[Batch, PrefixTree | None]:
    """The rows of a micro-batch, and the prefixes that they share."""
    return (batch.take(rows), tree.take(rows)) if rows else (IDLE, None)
