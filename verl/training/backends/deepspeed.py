"""The training engine on DeepSpeed's ZeRO. Rows, losses and metrics are those of `TorchEngine`; steps and pieces of
weights are its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.algorithms.loss_terms import Loss, LossPart
from verl.errors import TrainingError
from verl.training.backends.zero import Piece, held_run, zero_engine
from verl.training.checkpointing import recomputing
from verl.training.engine import Memory, Metrics
from verl.training.forward import Forward
from verl.training.optimizer import MOMENTS, check_masters, check_optimizer, fill_state
from verl.training.options import OptimConfig
from verl.training.parallel.result import Parallel
from verl.training.schedule import MicroBatch, OneStage
from verl.training.torch_engine import NO_GRADIENT, TorchEngine
from verl.weights.cuts import run_blocks
from verl.weights.meta import give_memory
from verl.weights.shard import Cut, Shard, Stream, WeightSpec
from verl.weights.shards import fill_block, fill_weights, load_model_shards, named_weights, tied_names

_HALF = (torch.bfloat16, torch.float16)


class DeepSpeedEngine(TorchEngine):
    """A `TrainEngine` of several ranks that trains, by ZeRO of the stage in `options.deepspeed_config`.

    Weights that no micro-batch of a step used are stepped with a gradient of zero, weight decay included.

    Args: those of `TorchEngine`; the layout is replicas, in stage 3 shards.

    Raises:
        ConfigError: DeepSpeed is not installed, or the model or the options need another engine.
    """

    def _lay_out(self, weights: Callable[[Any], Iterable[Shard]] | None, *, trains: bool) -> None:
        options, forward = self.options, self._forward
        if weights is not None:  # whole: DeepSpeed cuts what is there
            give_memory(forward, forward.packed.device)
            load_model_shards(self.model, weights(self.model))
        self._parallel = Parallel(self.mesh, in_step=True)
        if options.deepspeed_config.zero_stage == 3:
            forward.packed.use_own_code()
        optim = options.optim or OptimConfig()
        self._engine, self._adam = zero_engine(forward, options.deepspeed_config.zero_stage, optim, self._ranks)
        self._zero = self._schedule = _ZeroSchedule(forward, self._engine)
        self._optimizer = None

    def update(self, parts: Sequence[LossPart]) -> Metrics:
        self.onload()
        self._zero.has_gradient = False
        with recomputing(self.model) if self.options.gradient_checkpointing else nullcontext():
            # DeepSpeed takes the mean over ranks, of what adds up.
            losses = [*self._schedule.forward_backward(self._micro_batches(parts), self.mesh.layout.size)]
        metrics, lr = self._measured(losses), self._adam.next_lr
        depends = torch.tensor(float(self._zero.has_gradient))
        self._ranks.all_reduce([depends], dist.ReduceOp.MAX, "replicate", "shard")
        before = self._adam.completed_steps
        self._adam.may_step, self._adam.grad_norm = bool(depends) and math.isfinite(metrics["loss"]), math.nan
        self._engine.step()
        if not depends:
            raise TrainingError(NO_GRADIENT)
        skipped = float(self._adam.completed_steps == before)
        return {**metrics, "grad_norm": self._adam.grad_norm, "lr": lr, "update/skipped": skipped}

    def specs(self) -> dict[str, WeightSpec]:
        cuts = (Cut("shard", None),)
        return {
            name: WeightSpec(name, _shape(weight), weight.dtype, cuts if hasattr(weight, "ds_tensor") else ())
            for name, weight in named_weights(self.model)
        }

    def shards(self) -> Iterator[Shard]:
        for name, weight in named_weights(self.model):
            for offset, block in _held(weight):
                yield Shard(name, _shape(weight), offset, block)

    def release_weight(self, name: str) -> int:
        """Nothing: pieces share the memory of what DeepSpeed has flattened."""
        return 0

    @torch.no_grad()
    def load_shards(self, shards: Iterable[Shard]) -> None:
        blocks = {name: [*_held(weight)] for name, weight in named_weights(self.model)}
        shapes = {name: _shape(weight) for name, weight in self.model.state_dict(keep_vars=True).items()}
        fill_weights(blocks, shards, shapes, tied_names(self.model), type(self.model).__name__)
        self._adam.refresh({name: _flat(weight) for name, weight in self.model.named_parameters()})

    def state(self) -> tuple[Iterable[Shard], dict[str, Any]]:
        meta = {"completed_steps": self._adam.completed_steps, "values": {}, "optimizer": "AdamW"}
        return Stream(self._state_shards), meta

    def _state_shards(self) -> Iterator[Shard]:
        for piece in self._adam.pieces:
            yield Shard.whole(f"{piece.name}.step", self._adam.state[piece.flat]["step"])
            for key, tensor in self._pieces_of(piece):
                for offset, block in piece.blocks(tensor):
                    yield Shard(f"{piece.name}.{key}", piece.shape, offset, block)

    def _pieces_of(self, piece: Piece) -> Iterator[tuple[str, Tensor]]:
        """Tensors laid out like the masters that a continuation needs, by the last part of their names."""
        for key in MOMENTS:
            yield key, self._adam.state[piece.flat][key]
        if piece.dtype in _HALF:
            yield "master", piece.flat.detach()

    @torch.no_grad()
    def load_state(self, shards: Iterable[Shard], meta: Mapping[str, Any]) -> None:
        check_optimizer("AdamW", meta)
        self.onload()
        targets = {f"{p.name}.{key}": (p, tensor) for p in self._adam.pieces for key, tensor in self._pieces_of(p)}
        sizes = {piece.name: piece.size for piece in self._adam.pieces}

        def fill(name: str, key: str, shard: Shard) -> int:
            if shard.name not in targets:  # steps, and masters of weights in full precision
                return sizes.get(name, 0)
            piece, tensor = targets[shard.name]
            return sum(fill_block(offset, block, shard) for offset, block in piece.blocks(tensor))

        weights = {name: (torch.Size(spec.shape), sizes.get(name, 0)) for name, spec in self.specs().items()}
        came = fill_state(shards, weights, fill)
        check_masters({piece.name: torch.empty(0, dtype=piece.dtype) for piece in self._adam.pieces}, came)
        for piece, tensor in (targets[name] for name in targets.keys() - came):  # of a weight without gradient so far
            piece.of(tensor).zero_()
        self._adam.completed_steps = int(meta["completed_steps"])
        for piece in self._adam.pieces:
            self._adam.state[piece.flat]["step"].fill_(self._adam.completed_steps)

    def offload(self, what: Collection[Memory] = ("optimizer", "gradients")) -> None:
        if "optimizer" in what:
            self._adam.move(torch.device("cpu"))

    def onload(self, what: Collection[Memory] = ("optimizer", "gradients")) -> None:
        if "optimizer" in what:
            self._adam.move(self._forward.packed.device)


class _ZeroSchedule(OneStage):
    """One micro-batch after the other. DeepSpeed reduces the gradients of each, in the first stage of the last.

    Attributes:
        has_gradient: whether a loss depended on the model.
    """

    def __init__(self, forward: Forward, engine: Any) -> None:
        super().__init__(forward)
        self._engine, self.has_gradient = engine, False

    def forward(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Any]:
        for one in micro_batches:
            yield one.finish(self._run(one))

    def forward_backward(self, micro_batches: Iterable[MicroBatch], loss_scale: float) -> Iterator[Loss]:
        ahead = iter(micro_batches)
        one = next(ahead, None)
        while one is not None:
            following = next(ahead, None)
            self._engine.set_gradient_accumulation_boundary(following is None)
            outputs = self._run(one)
            loss = one.finish(outputs)
            total = loss.total
            self.has_gradient |= total.requires_grad
            if not total.requires_grad:  # all ranks have the same backward passes
                total = torch.stack([values.sum() for values in outputs.values()]).sum() * 0.0
            self._engine.backward(total * loss_scale)
            yield loss.detached()
            one = following

    def _run(self, one: MicroBatch) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = self._engine(self._forward.pack(one.batch), one.want, one.temperature)
        return outputs


def _shape(weight: Any) -> tuple[int, ...]:
    return tuple(getattr(weight, "ds_shape", weight.shape))


def _flat(weight: Any) -> Tensor:
    """The live elements of a weight that this rank holds, in one dimension."""
    if not hasattr(weight, "ds_tensor"):
        return weight.detach().reshape(-1)  # type: ignore[no-any-return]
    return weight.ds_tensor.detach()[: held_run(weight)[1]]  # type: ignore[no-any-return]


def _held(weight: Any) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The blocks of a weight that this rank holds: where each begins, and its live elements."""
    if hasattr(weight, "ds_tensor"):
        return run_blocks(_shape(weight), held_run(weight)[0], _flat(weight))
    return iter([((0,) * weight.dim(), weight.detach())])
