"""The training engine on DeepSpeed's ZeRO: rows, losses and metrics are those of every engine, steps and this rank's
pieces of weights DeepSpeed's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from verl.algorithms.loss_terms import Loss, LossTerm
from verl.errors import TrainingError
from verl.models.lora import merged_shards
from verl.training.backends.zero import MasterRange, ZeroAdamW, flat_part, held_run, zero_engine
from verl.training.engine import TrainEngine, WeightSource
from verl.training.forward import Forward
from verl.training.local_weights import LocalWeights
from verl.training.optimizer import MOMENTS, check_masters, check_optimizer, fill_state
from verl.training.options import EngineOptions, OptimConfig
from verl.training.ranks import Parallel, Ranks
from verl.training.runner import DEPENDS, NO_GRADIENT, Metrics, MicroBatch, MicroBatchRunner, OneStage
from verl.training.steps import nothing_to_compute
from verl.weights.meta import give_memory
from verl.weights.shard import Shard, ShardedDim, Stream, WeightSpec, run_blocks
from verl.weights.shards import fill_block, fill_weights, load_model_shards, named_weights, tied_names

_HALF = (torch.bfloat16, torch.float16)


class DeepSpeedEngine(TrainEngine):
    """A `TrainEngine` of several ranks that trains, by ZeRO of the stage in `options.deepspeed_config`. The layout is
    replicas, in stage 3 shards.

    Weights that no micro-batch of a step used are stepped with a gradient of zero, weight decay included.

    Raises:
        ConfigError: DeepSpeed is not installed, or the model or the options need another engine.
    """

    def assemble(self, forward: Forward, ranks: Ranks, options: EngineOptions, source: WeightSource | None) -> None:
        if source is not None:  # whole: DeepSpeed cuts what is there
            give_memory(forward, forward.packed.device)
            load_model_shards(self.model, source(self.model))
        stage = options.deepspeed_config.zero_stage
        if stage == 3:
            forward.packed.fused = None
        engine, adam = zero_engine(forward, stage, options.optim or OptimConfig(), ranks)
        parallel = Parallel(self.mesh, schedule=_ZeroSchedule(forward, engine), in_step=True)
        self.runner = MicroBatchRunner(forward, ranks, options, parallel)
        self.weights = ZeroWeights(self.model)
        self.steps = ZeroSteps(self.runner, engine, adam, self.weights)


class ZeroWeights(LocalWeights):
    """The weights that DeepSpeed has flattened: whole, or in stage 3 a run of each one's elements."""

    def __init__(self, model: nn.Module) -> None:
        self.model, cuts = model, (ShardedDim("shard", None),)
        self.specs = {
            name: WeightSpec(name, _shape(weight), weight.dtype, cuts if hasattr(weight, "ds_tensor") else ())
            for name, weight in named_weights(model)
        }

    def shards(self) -> Iterator[Shard]:
        for name, weight in named_weights(self.model):
            for offset, block in _held(weight):
                yield Shard(name, _shape(weight), offset, block)

    def merged(self) -> Iterator[Shard]:
        return merged_shards(self.model)

    @torch.no_grad()
    def load(self, shards: Iterable[Shard]) -> None:
        blocks = {name: [*_held(weight)] for name, weight in named_weights(self.model)}
        shapes = {name: _shape(weight) for name, weight in self.model.state_dict(keep_vars=True).items()}
        fill_weights(blocks, shards, shapes, tied_names(self.model), type(self.model).__name__)


class ZeroSteps:
    """Steps that DeepSpeed makes, on the decisions of `ZeroAdamW`."""

    def __init__(self, runner: MicroBatchRunner, engine: Any, adam: ZeroAdamW, weights: ZeroWeights) -> None:
        self._runner, self._engine, self.optimizer, self._weights = runner, engine, adam, weights
        self.refresh_masters = adam.refresh_masters

    def free_gradients(self) -> None:
        """Nothing: DeepSpeed has its own sums, which it frees."""

    def update(self, parts: Sequence[LossTerm]) -> Metrics:
        adam = self.optimizer
        # DeepSpeed takes the mean over ranks, of what adds up.
        losses: list[Loss] = []
        if nothing_to_compute(parts):
            self._runner.backward_of_nothing()
        else:
            losses = self._runner.backward(parts, self._runner.ranks.mesh.size)
        metrics, lr = self._runner.metrics(losses), adam.next_lr
        depends = metrics.pop(DEPENDS, True)  # absent where all ranks have nothing to compute
        before = adam.completed_steps
        adam.may_step, adam.grad_norm = bool(depends) and math.isfinite(metrics["loss"]), math.nan
        self._engine.step()
        if not depends:
            raise TrainingError(NO_GRADIENT)
        skipped = float(adam.completed_steps == before)
        return {**metrics, "grad_norm": adam.grad_norm, "lr": lr, "update/skipped": skipped}

    def state(self) -> tuple[Iterable[Shard], dict[str, Any]]:
        meta = {"completed_steps": self.optimizer.completed_steps, "values": {}, "optimizer": "AdamW"}
        return Stream(self._state_shards), meta

    def _state_shards(self) -> Iterator[Shard]:
        for part in self.optimizer.ranges:
            yield Shard.whole(f"{part.name}.step", self.optimizer.state[part.flat]["step"])
            for key, tensor in self._state_of(part):
                for offset, block in part.blocks(tensor):
                    yield Shard(f"{part.name}.{key}", part.shape, offset, block)

    def _state_of(self, part: MasterRange) -> Iterator[tuple[str, Tensor]]:
        """Tensors laid out like the masters that a continuation needs, by the last part of their names."""
        for key in MOMENTS:
            yield key, self.optimizer.state[part.flat][key]
        if part.dtype in _HALF:
            yield "master", part.flat.detach()

    @torch.no_grad()
    def load_state(self, shards: Iterable[Shard], meta: Mapping[str, Any]) -> None:
        check_optimizer("AdamW", meta)
        targets = {f"{p.name}.{key}": (p, tensor) for p in self.optimizer.ranges for key, tensor in self._state_of(p)}
        sizes = {part.name: part.size for part in self.optimizer.ranges}

        def fill(name: str, key: str, shard: Shard) -> int:
            if shard.name not in targets:  # steps, and masters of weights in full precision
                return sizes.get(name, 0)
            part, tensor = targets[shard.name]
            return sum(fill_block(offset, block, shard) for offset, block in part.blocks(tensor))

        weights = {name: (torch.Size(spec.shape), sizes.get(name, 0)) for name, spec in self._weights.specs.items()}
        came = fill_state(shards, weights, fill)
        check_masters({part.name: torch.empty(0, dtype=part.dtype) for part in self.optimizer.ranges}, came)
        for part, tensor in (targets[name] for name in targets.keys() - came):  # of a weight without gradient so far
            part.of(tensor).zero_()
        self.optimizer.completed_steps = int(meta["completed_steps"])
        for part in self.optimizer.ranges:
            self.optimizer.state[part.flat]["step"].fill_(self.optimizer.completed_steps)


class _ZeroSchedule(OneStage):
    """One micro-batch after the other. DeepSpeed reduces the gradients of each, in the first stage of the last."""

    def __init__(self, forward: Forward, engine: Any) -> None:
        super().__init__(forward, engine)
        self._engine = engine

    def forward_backward(self, micro_batches: Iterable[MicroBatch], loss_scale: float) -> Iterator[Loss]:
        ahead = iter(micro_batches)
        one = next(ahead, None)
        while one is not None:
            following = next(ahead, None)
            self._engine.set_gradient_accumulation_boundary(following is None)
            loss = one.finish(self._outputs(one))
            self._engine.backward(loss.total * loss_scale)
            yield loss.detached()
            one = following


def _shape(weight: Any) -> tuple[int, ...]:
    return tuple(getattr(weight, "ds_shape", weight.shape))


def _held(weight: Any) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The blocks of a weight that this rank holds: where each begins, and its live elements."""
    if hasattr(weight, "ds_tensor"):
        return run_blocks(_shape(weight), held_run(weight)[0], flat_part(weight))
    return iter([((0,) * weight.dim(), weight.detach())])
