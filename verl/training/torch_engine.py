"""The training engine on torch alone: any layout that `parallelize` knows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.algorithms.loss_terms import Loss, LossPart, combine_metrics
from verl.batch import Batch
from verl.errors import DataError, TrainingError
from verl.models.lora import adapters_off, merged_shards, reference_weights, shape_of
from verl.models.packed import PackedModel
from verl.training.checkpointing import enable_checkpointing, recomputing
from verl.training.engine import Memory, Metrics
from verl.training.forward import Forward
from verl.training.gradients import Gradients
from verl.training.micro_batch import balanced, split
from verl.training.mini_batch import MiniBatch
from verl.training.optimizer import MixedPrecisionOptimizer
from verl.training.options import EngineOptions, Head, OptimConfig, check_training
from verl.training.parallelize import parallelize, piece
from verl.training.ranks import Ranks
from verl.training.schedule import MicroBatch, OneStage, Schedule
from verl.weights.cuts import blocks_of, cuts_of, local_part
from verl.weights.layout import DATA_DIMS, Mesh
from verl.weights.meta import give_memory
from verl.weights.shard import Cut, Shard, Stream, WeightSpec
from verl.weights.shards import fill_weights, load_model_shards, model_shards, named_weights

# The row of the forwards that a rank runs for the sake of the others.
_IDLE = Batch.from_columns({"prompt_tokens": [[0]], "response_tokens": [[0]]})

NO_GRADIENT = (
    "the loss does not depend on what the model predicts: compute it from log_probs, values or scores, without detach "
    "or no_grad"
)


class TorchEngine:
    """A `TrainEngine`. Dropout is off, in training too.

    Args:
        model: a causal LM, or a value or reward model, whole and equal on all ranks. Its live tensors are trained,
            none is copied; where the mesh cuts weights, its parameters are DTensors from then on.
        options: how it is trained; without optimizer settings it is only read.
        head: what the model predicts.
        mesh: the ranks that share it.
        group: their process group; None for one rank.
        parts: groups of some of them, see `Ranks`.
        packed: the model (or its backbone) as a `PackedModel`, if there is one already.
        weights: for a model without weights (`verl.weights.meta`): those of a model, once it is laid out, of which the
            parts that are kept here are read.
        device: where the weights of such a model go.

    Raises:
        ConfigError: there is nothing to train, the model has no gradient checkpointing, or the layout does not go with
            the model or the optimizer.
    """

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
        weights: Callable[[Any], Iterable[Shard]] | None = None,
        device: str | None = None,
    ) -> None:
        self.model, self.options = model, options
        #: Weights whose memory is freed -> its bytes.
        self._lent: dict[str, int] = {}
        self.mesh = mesh or Mesh()
        self._forward = Forward(
            model,
            head,
            packed,
            share_prompts=options.share_prompts,
            fused_kernels=options.fused_kernels,
            autocast=options.use_amp,
            device=device,
            remove_padding=options.remove_padding,
        )
        self.precision = torch.float64 if self._forward.packed.dtype == torch.float64 else torch.float32
        check_training(options, self.mesh.layout, shape_of(model), **self._forward.asked())
        self._ranks = Ranks(self.mesh, group, parts)
        model.eval()
        if options.use_torch_compile:
            self._forward.compile_layers()
        if options.gradient_checkpointing:
            enable_checkpointing(self._forward.packed.model)
        self._lay_out(weights, trains=options.trains)

    def _lay_out(self, weights: Callable[[Any], Iterable[Shard]] | None, *, trains: bool) -> None:
        """Lay the model out over the ranks, read its weights where it has none, and make what trains it."""
        model, options = self.model, self.options
        #: Shapes of all weights by every name they have, those of other pipeline stages too.
        self._shapes = {name: tuple(weight.shape) for name, weight in model.state_dict(keep_vars=True).items()}
        names = [name for name, _ in named_weights(model)]
        self._parallel = parallelize(self._forward, self._ranks, options.fsdp_config, trains=trains)
        if weights is not None:
            give_memory(self._forward, self._forward.packed.device)
            self._load(weights(model))
        #: What the reference of adapters reads beside the base.
        self._first = reference_weights(model) if trains and self._forward.head == "lm" else {}
        self._schedule: Schedule = self._parallel.schedule or OneStage(self._forward)
        self._specs = self._all_specs(names)
        self._optimizer: MixedPrecisionOptimizer | None = None
        if trains:
            trained = dict(model.named_parameters())
            self._optimizer = MixedPrecisionOptimizer(
                trained,
                options.optim or OptimConfig(max_grad_norm=None),
                options.optimizer,
                pieces={name: piece(weight) for name, weight in trained.items()},
                is_scaled=torch.float16 in self._parallel.dtypes.values(),
                scheduler=options.scheduler,
            )

    @torch.no_grad()
    def predict(
        self, batch: Batch, want: Collection[str], *, temperature: float = 1.0, adapters: bool = True
    ) -> dict[str, Tensor]:
        with nullcontext() if adapters else adapters_off(self.model, self._first):
            return self._predict(batch, want, temperature)

    def _predict(self, batch: Batch, want: Collection[str], temperature: float) -> dict[str, Tensor]:
        self._check_here()
        names = tuple(want)
        self._forward.check_wanted(names)
        self._forward.check_batch(batch)
        lengths = [1] * len(batch) if self._forward.head == "score" else batch.lengths("response_tokens")
        own = self._split(batch)
        idle = self._most(len(own)) - len(own)
        batches = chain((batch.take(rows) for rows in own), repeat(_IDLE, idle))
        micro_batches = (MicroBatch(rows, names, temperature, _on_host) for rows in batches)
        by_row: dict[str, dict[int, Tensor]] = {name: {} for name in names}
        for number, outputs in enumerate(self._schedule.forward(micro_batches)):
            for name in names if number < len(own) else ():
                parts = outputs[name].split([lengths[row] for row in own[number]])
                by_row[name].update(zip(own[number], parts, strict=True))
        predicted = {name: torch.empty(sum(lengths), dtype=self.precision) for name in names}
        for name, found in by_row.items():
            if found:
                torch.cat([found[row] for row in sorted(found)], out=predicted[name])
        self._ranks.take_last([*predicted.values()], "pp")
        return predicted

    def update(self, parts: Sequence[LossPart]) -> Metrics:
        self._check_here()
        optimizer = self._trained()
        optimizer.onload()
        keeps_less = recomputing(self.model) if self.options.gradient_checkpointing else nullcontext()
        try:
            with keeps_less, optimizer.gradients.collecting():
                scale = optimizer.gradients.loss_scale
                losses = [*self._schedule.forward_backward(self._micro_batches(parts), scale)]
            return self._step(optimizer, losses)
        finally:
            optimizer.gradients.clear()
            if self.options.fsdp_config.optimizer_offload:
                optimizer.offload()
            if self._forward.packed.device.type == "cpu":
                from verl.kernels.library_memory import return_free_memory

                return_free_memory()

    @torch.no_grad()
    def loss(self, parts: Sequence[LossPart]) -> Metrics:
        self._check_here()
        return self._measured([*self._schedule.forward(self._micro_batches(parts))])

    def specs(self) -> dict[str, WeightSpec]:
        return dict(self._specs)

    def shards(self) -> Iterator[Shard]:
        self._check_here()
        for shard in model_shards(self.model):
            dtype = self._parallel.dtypes.get(shard.name, shard.tensor.dtype)
            yield Shard(shard.name, shard.global_shape, shard.offset, shard.tensor.to(dtype))

    def merged_shards(self) -> Iterator[Shard]:
        self._check_here()
        return merged_shards(self.model)

    def load_shards(self, shards: Iterable[Shard]) -> None:
        self._check_here()
        self._load(shards)
        if self._optimizer is not None:
            self._optimizer.refresh_masters()

    def _load(self, shards: Iterable[Shard]) -> None:
        """Fill this rank's pieces of the weights."""
        load_model_shards(self.model, shards, self._shapes)

    def release_weight(self, name: str) -> int:
        weights = dict(named_weights(self.model))
        if not self._lent:
            self._users = Counter(_storage(weight)._cdata for weight in weights.values())
        if name not in weights:  # an engine with parameters of its own kind
            return 0
        weight = weights[name].detach()
        local, storage = local_part(weight), _storage(weight)
        is_own = self._users[storage._cdata] == 1 and (storage.nbytes() == local.nbytes or bool(cuts_of(weight)))
        if not is_own or not storage.resizable() or self._specs[name].dtype != local.dtype or not local.numel():
            return 0
        self._lent[name] = storage.nbytes()
        storage.resize_(0)
        return local.nbytes

    def restore_weights(self, name: str, shards: Iterable[Shard]) -> None:
        weight = dict(named_weights(self.model))[name].detach()
        _storage(weight).resize_(self._lent.pop(name))
        fill_weights({name: [*blocks_of(weight)]}, shards, self._shapes, {}, type(self.model).__name__)

    def _check_here(self) -> None:
        if self._lent:
            raise TrainingError(
                f"'{next(iter(self._lent))}' and {len(self._lent) - 1} more weights are lent to the generation layout: "
                "release() the generation weights before the training engine is used"
            )

    def state(self) -> tuple[Iterable[Shard], dict[str, Any]]:
        self._check_here()
        return Stream(self._state_shards), self._trained().meta()

    def _state_shards(self) -> Iterator[Shard]:
        weights = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        # Of weights that are wider than they are served, the live pieces are the masters.
        served = self._parallel.dtypes
        wider = (name for name, weight in weights.items() if served.get(name, weight.dtype) != weight.dtype)
        masters = ((f"{name}.master", local_part(weights[name].detach())) for name in wider)
        for name, tensor in chain(self._trained().tensors(), masters):
            weight = weights[name.rpartition(".")[0]]
            if cuts_of(weight) and tensor.shape == local_part(weight).shape:
                for offset, block in blocks_of(weight, tensor):
                    yield Shard(name, tuple(weight.shape), offset, block)
            else:
                yield Shard.whole(name, tensor)
            del tensor  # a master that was made for the caller, before the next one is

    @torch.no_grad()
    def load_state(self, shards: Iterable[Shard], meta: Mapping[str, Any]) -> None:
        here = {name for name, _ in self.model.named_parameters()}
        elsewhere = self._shapes.keys() - here  # on other pipeline stages
        self._trained().load_state((s for s in shards if s.name.rpartition(".")[0] not in elsewhere), meta)

    def offload(self, what: Collection[Memory] = ("optimizer", "gradients")) -> None:
        if self._optimizer is not None:
            self._optimizer.offload(what)

    def onload(self, what: Collection[Memory] = ("optimizer", "gradients")) -> None:
        if self._optimizer is not None:
            self._optimizer.onload(what)

    def _micro_batches(self, parts: Sequence[LossPart]) -> Iterator[MicroBatch]:
        """The micro-batches of this rank, part after part, with their losses."""
        if not any(len(part.rows) for part in parts):
            raise DataError("the mini-batch has no rows: there is nothing to train on")
        for part in (part for part in parts if len(part.rows)):
            self._forward.check_batch(part.rows)
            mini_batch = MiniBatch(part, self.precision)
            want = self._forward.wanted(part.needs.entropy)
            own, idle = self._dealt(part)
            for rows in own:
                batch = part.rows.take(rows)
                finish = partial(mini_batch.loss, rows, batch)
                yield MicroBatch(batch, want, part.needs.temperature, finish)
            for _ in range(idle):
                yield MicroBatch(_IDLE, want, part.needs.temperature, _no_loss)

    def _dealt(self, part: LossPart) -> tuple[list[list[int]], int]:
        """Rows of each micro-batch of this rank, and how many more it runs for the sake of others."""
        batch, coupled = part.rows, part.needs.coupled
        index, size = self.mesh.rows(self._ranks.rank) or (0, 1)
        if size == 1:
            return self._split(batch, coupled), 0
        dealt = balanced(batch, size, coupled, self.options.share_prompts)
        cut = [self._split(batch.take(rows), coupled) if rows else [] for rows in dealt]
        own = [[dealt[index][row] for row in rows] for rows in cut[index]]
        return own, max(map(len, cut)) - len(own) if self._parallel.in_step else 0

    def _split(self, batch: Batch, coupled: bool = False) -> list[list[int]]:
        options = self.options
        return split(
            batch, options.max_tokens_per_micro_batch, options.micro_batch_size, coupled, options.share_prompts
        )

    def _most(self, forwards: int) -> int:
        """How many forwards the rank with the most runs, where all must run as many."""
        count = torch.tensor(forwards)
        if self._parallel.in_step:
            self._ranks.all_reduce([count], dist.ReduceOp.MAX, *DATA_DIMS)
        return int(count)

    def _measured(self, losses: list[Loss]) -> Metrics:
        """`loss` and metrics of all ranks' micro-batches."""
        metrics = combine_metrics([loss.metrics for loss in losses])
        own = {**metrics, "loss": sum(float(loss.total) for loss in losses)}
        return combine_metrics(self._ranks.gather(own, "pp", *DATA_DIMS))

    def _step(self, optimizer: MixedPrecisionOptimizer, losses: list[Loss]) -> Metrics:
        gradients = optimizer.gradients
        for reduce in self._parallel.reductions:
            reduce(gradients)
        metrics, grad_norm, lr = self._measured(losses), self._norm(gradients), optimizer.lr
        if not gradients.any():
            raise TrainingError(NO_GRADIENT)
        skipped = not (math.isfinite(metrics["loss"]) and math.isfinite(grad_norm))
        if skipped:
            gradients.rejected()
        else:
            optimizer.step(grad_norm)
        return {**metrics, "grad_norm": grad_norm, "lr": lr, "update/skipped": float(skipped)}

    def _norm(self, gradients: Gradients) -> float:
        """Of the gradient over all ranks' pieces, each element counted once."""
        norm = gradients.norm(self._parallel.copies)
        if not self._parallel.cut_dims:
            return norm
        square = torch.tensor(norm**2, dtype=torch.float64)
        self._ranks.all_reduce([square], dist.ReduceOp.SUM, *self._parallel.cut_dims)
        return float(square.sqrt())

    def _own_specs(self) -> dict[str, tuple[str, tuple[Cut, ...]]]:
        """Dtype and cuts of the weights here."""
        dtypes = self._parallel.dtypes
        return {
            name: (str(dtypes.get(name, weight.dtype)).removeprefix("torch."), cuts_of(weight))
            for name, weight in named_weights(self.model)
        }

    def _all_specs(self, names: Sequence[str]) -> dict[str, WeightSpec]:
        """Of the weights here and on other pipeline stages, in the order of `names`."""
        own = self._own_specs()
        stage = self.mesh.coordinate(self._ranks.rank)["pp"]
        stages = sorted(self._ranks.gather((stage, own), "pp"), key=lambda found: int(found[0]))
        found = {name: spec for _, specs in stages for name, spec in specs.items()}
        held = {name: [stage for stage, specs in stages if name in specs] for name in found}
        return {
            name: WeightSpec(
                name,
                self._shapes[name],
                getattr(torch, dtype),
                tuple(Cut(*cut) for cut in cuts),
                tuple(held[name]) if len(stages) > 1 else (),
            )
            for name, (dtype, cuts) in ((name, found[name]) for name in names)
        }

    def _trained(self) -> MixedPrecisionOptimizer:
        if self._optimizer is None:
            raise TrainingError("this model is only read: make its engine with `optim` to train it")
        return self._optimizer


def _storage(weight: Tensor) -> torch.UntypedStorage:
    return local_part(weight.detach()).untyped_storage()


def _on_host(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: values.cpu() for name, values in outputs.items()}


def _no_loss(outputs: dict[str, Tensor]) -> Loss:
    """Nothing, with a gradient of zeros for every weight that the outputs depend on."""
    return Loss(total=torch.stack([values.sum() for values in outputs.values()]).sum() * 0.0)
