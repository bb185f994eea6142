"""What every training engine does with rows: predictions, losses and metrics, one micro-batch at a time.

Shapes: R response tokens of all rows, row after row; S rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from verl.algorithms.loss_terms import Loss, LossNeeds, LossTerm, combine_metrics
from verl.attention.prefix_tree import PrefixTree
from verl.batch import Batch
from verl.errors import DataError
from verl.training.forward import Forward
from verl.training.micro_batch import Limits, deal
from verl.training.mini_batch import MiniBatch
from verl.training.options import EngineOptions
from verl.training.ranks import Parallel, Ranks, gather_json
from verl.weights.layout import DATA_DIMS

Metrics: TypeAlias = dict[str, float]

# The row of an empty micro-batch, which a rank runs for the sake of the others' collectives.
_IDLE = Batch.from_columns({"prompt_tokens": [[0]], "response_tokens": [[0]]})

NO_GRADIENT = (
    "the loss does not depend on what the model predicts: compute it from log_probs, values or scores, without detach "
    "or no_grad"
)


#: Key in the metrics of a backward pass: how many losses with rows depend on what the model predicts.
DEPENDS = "loss/depends"


class MicroBatch(NamedTuple):
    """Rows of one forward.

    Attributes:
        want: the predictions to make of them.
        finish: turns the predictions into the result of the micro-batch: a `Loss`, or anything.
        tree: what they share.
    """

    batch: Batch
    want: tuple[str, ...]
    temperature: float
    finish: Callable[[dict[str, Tensor]], Any]
    tree: PrefixTree | None = None


class Schedule(Protocol):
    """How this rank runs the micro-batches of its rows. Results come in their order."""

    def forward(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Any]:
        """What `finish` returns for each; nothing on a rank without the model's head."""

    def forward_backward(self, micro_batches: Iterable[MicroBatch], loss_scale: float) -> Iterator[Loss]:
        """The losses, detached, after the backward pass of each times `loss_scale`."""


class OneStage:
    """One micro-batch after the other, through a model in one piece.

    Args:
        wrapped: `forward` in what calls it for us; None: itself.
    """

    def __init__(self, forward: Forward, wrapped: Callable[..., dict[str, Tensor]] | None = None) -> None:
        self._forward, self._wrapped = forward, wrapped or forward

    def forward(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Any]:
        for one in micro_batches:
            yield one.finish(self._outputs(one))

    def _outputs(self, one: MicroBatch) -> dict[str, Tensor]:
        with self._forward.precision():
            return self._wrapped(self._forward.pack(one.batch, one.tree), one.want, one.temperature)

    def forward_backward(self, micro_batches: Iterable[MicroBatch], loss_scale: float) -> Iterator[Loss]:
        for loss in self.forward(micro_batches):
            if loss.total.requires_grad:
                with self._forward.precision():
                    (loss.total * loss_scale).backward()
            yield loss.detached()


class MicroBatchRunner:
    """Runs rows through a model that is laid out over ranks. All ranks of the mesh call its methods in one order.

    Args:
        forward: the model, as a function of a micro-batch.
        ranks: those that share it.
        parallel: how it is laid out over them.

    Attributes:
        schedule: the order in which micro-batches go forward and backward.
        precision: dtype of losses and predictions.
    """

    def __init__(self, forward: Forward, ranks: Ranks, options: EngineOptions, parallel: Parallel) -> None:
        self.forward, self.schedule = forward, parallel.schedule or OneStage(forward)
        self.precision = torch.float64 if forward.packed.dtype == torch.float64 else torch.float32
        self.ranks, self.options, self.parallel = ranks, options, parallel

    @property
    def shares_prefixes(self) -> bool:
        """Whether what rows begin with is computed once. Padded rows, as those of models with state, have each all."""
        return self.options.share_prompts and not self.forward.is_padded

    def predict(self, batch: Batch, want: Collection[str], temperature: float) -> dict[str, Tensor]:
        """The predictions `want` of this rank's rows by name, on the host: `[R]`, or `[S]` for scores."""
        names = tuple(want)
        self.forward.check_wanted(names)
        self.forward.check_batch(batch)
        lengths = [1] * len(batch) if self.forward.head == "score" else batch.lengths("response_tokens")
        batch = batch.drop(["response_mask"])  # all tokens are predicted
        (dealt,), tree = deal(batch, range(len(batch)), 1, self._limits())
        if self.parallel.in_step:
            most = torch.tensor(len(dealt))  # forwards that the rank with the most runs
            self.ranks.all_reduce([most], dist.ReduceOp.MAX, *DATA_DIMS)
            dealt += [[]] * (int(most) - len(dealt))
        micro_batches = (
            MicroBatch(_rows(batch, rows), names, temperature, _on_host, tree.take(rows) if rows else None)
            for rows in dealt
        )
        by_row: dict[str, dict[int, Tensor]] = {name: {} for name in names}
        # Not strict: a pipeline stage without the head runs every micro-batch and yields nothing; `take_last` below
        # gives it the predictions of the last stage. Empty micro-batches, run for the sake of other ranks, have no
        # rows.
        for outputs, rows in zip(self.schedule.forward(micro_batches), dealt, strict=False):
            for name in names if rows else ():
                values = outputs[name].split([lengths[row] for row in rows])
                by_row[name].update(zip(rows, values, strict=True))
        predicted = {name: torch.empty(sum(lengths), dtype=self.precision) for name in names}
        for name, values_of in by_row.items():
            if values_of:
                torch.cat([values_of[row] for row in sorted(values_of)], out=predicted[name])
        self.ranks.take_last([*predicted.values()], "pp")
        return predicted

    def backward(self, parts: Sequence[LossTerm], loss_scale: float) -> list[Loss]:
        """The losses of this rank's micro-batches, after the backward pass of each times `loss_scale`. Their metrics
        have `DEPENDS`."""
        context: AbstractContextManager[None] = nullcontext()
        if self.options.gradient_checkpointing:
            from verl.training.checkpointing import recomputing

            context = recomputing(self.forward.model)
        with context:
            return [*self.schedule.forward_backward(map(self._trained, self._micro_batches(parts)), loss_scale)]

    def backward_of_nothing(self) -> None:
        """One forward and backward pass that all ranks make without rows: a gradient of zeros, for a back end that has
        no other way to it."""
        want = self.forward.wanted(LossNeeds())
        [*self.schedule.forward_backward(iter([MicroBatch(_IDLE, want, 1.0, _no_loss)]), 1.0)]

    def loss(self, parts: Sequence[LossTerm]) -> Metrics:
        """`loss` and metrics, without a backward pass."""
        return self.metrics([*self.schedule.forward(self._micro_batches(parts))])

    def metrics(self, losses: Sequence[Loss]) -> Metrics:
        """`loss` and metrics of the micro-batches of all ranks."""
        here = combine_metrics([loss.metrics for loss in losses])
        here["loss"] = sum(float(loss.total) for loss in losses)
        return combine_metrics(gather_json(here, self.ranks.group("pp", *DATA_DIMS)))

    def _micro_batches(self, parts: Sequence[LossTerm]) -> Iterator[MicroBatch]:
        """The micro-batches of this rank, part after part, with their losses."""
        if not any(len(part.rows) for part in parts):
            raise DataError("the mini-batch has no rows: there is nothing to train on")
        for part in (part for part in parts if part.computed):
            self.forward.check_batch(part.rows)
            mini_batch = MiniBatch(part, self.precision)
            want = self.forward.wanted(part.needs)
            # Every rank is given the rows of all and takes its own: then totals and the deal need no communication, and
            # no rank can be dealt another one's rows.
            coupled, in_step = part.needs.coupled, self.parallel.in_step
            index, size = self.ranks.mesh.rows(self.ranks.rank) or (0, 1)
            dealt, tree = deal(part.rows, part.computed, size, self._limits(), coupled=coupled, in_step=in_step)
            for rows in dealt[index]:
                batch = _rows(part.rows, rows)
                finish = partial(mini_batch.loss, rows, batch) if rows else _no_loss
                yield MicroBatch(batch, want, part.needs.temperature, finish, tree.take(rows) if rows else None)

    def _trained(self, one: MicroBatch) -> MicroBatch:
        """The micro-batch, whose loss says whether it depends on the predictions. Of ranks in step it has a backward
        pass in any case: one without rows has one too, and would wait in it for this rank."""

        def finish(outputs: dict[str, Tensor]) -> Loss:
            loss = one.finish(outputs)
            depends = loss.total.requires_grad
            total = loss.total if depends or not self.parallel.in_step else loss.total + _no_loss(outputs).total
            return Loss(total=total, metrics={**loss.metrics, DEPENDS: float(depends)})

        return one if one.finish is _no_loss else one._replace(finish=finish)

    def _limits(self) -> Limits:
        options, packed = self.options, not self.forward.is_padded
        return Limits(options.max_tokens_per_micro_batch, options.micro_batch_size, options.share_prompts, packed)


def _rows(batch: Batch, rows: Sequence[int]) -> Batch:
    return batch.take(rows) if rows else _IDLE


def _on_host(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: values.cpu() for name, values in outputs.items()}


def _no_loss(outputs: dict[str, Tensor]) -> Loss:
    """Nothing, with a gradient of zeros for every weight that the outputs depend on."""
    # A constant 0 would have no backward pass, and FSDP gathers and reduces in that pass: the other ranks, which have
    # rows, would wait for this one forever. So the 0 depends on all outputs.
    return Loss(total=torch.stack([values.sum() for values in outputs.values()]).sum() * 0.0)
