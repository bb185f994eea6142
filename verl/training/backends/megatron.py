"""The training engine on Megatron-LM's layers: rows, losses, metrics, schedule and optimizer are those of every engine,
the model and the pieces of its weights Megatron's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from verl.errors import CheckpointError
from verl.training.backends.megatron_model import Block, MegatronModel
from verl.training.engine import TrainEngine, WeightSource
from verl.training.forward import Forward
from verl.training.local_weights import LocalWeights, WholeModel
from verl.training.optimizer import MixedPrecisionOptimizer
from verl.training.options import EngineOptions, OptimConfig
from verl.training.parallel.data import replicate
from verl.training.parallel.pipeline import Pipeline
from verl.training.parallel.stages import Stage
from verl.training.ranks import Parallel, Ranks
from verl.training.runner import MicroBatchRunner
from verl.training.steps import OptimizerSteps
from verl.weights.shard import Shard, ShardedDim
from verl.weights.shards import fill_weights, model_shards, overlap

_EMBEDDING = "gpt.embedding.word_embeddings.weight"


class MegatronEngine(TrainEngine):
    """A `TrainEngine` of ranks that share a model: tensor and pipeline parallelism, and replicas of these.

    The model that is given is copied; its own tensors are not trained.

    Raises:
        ConfigError: megatron-core is not installed, or model, layout or options need another engine.
    """

    model: MegatronModel

    def assemble(self, forward: Forward, ranks: Ranks, options: EngineOptions, source: WeightSource | None) -> None:
        layout, original, whole = self.mesh.layout, self.model, WholeModel(self.model)
        number = self.mesh.coordinate(ranks.rank)["pp"]
        stage = Stage(number, layout.pp, forward.packed.hidden_size, forward.packed.dtype) if layout.pp > 1 else None
        model = MegatronModel(forward, ranks, stage, checkpointing=options.gradient_checkpointing)
        model.requires_grad_(options.trains)
        self.model = forward.model = forward.packed = model  # type: ignore[assignment]
        forward.is_padded = False
        self.weights = weights = MegatronWeights(model, whole, ranks)
        weights.load((source or model_shards)(original))
        parallel = _parallel(forward, model, whole, ranks, stage)
        self.runner = MicroBatchRunner(forward, ranks, options, parallel)
        if options.trains:
            trained = dict(model.named_parameters())
            optimizer = MixedPrecisionOptimizer(
                trained, options.optim or OptimConfig(), is_scaled=forward.packed.dtype == torch.float16
            )
            self.steps = OptimizerSteps(self.runner, optimizer, weights)


def _parallel(forward: Forward, model: MegatronModel, whole: WholeModel, ranks: Ranks, stage: Stage | None) -> Parallel:
    """What the steps need to know of the layout."""
    layout = ranks.mesh.layout
    parallel = Parallel(ranks.mesh, cut_dims=tuple(dim for dim in ("pp", "tp") if getattr(layout, dim) > 1))
    names = [name for name, _ in model.named_parameters()]
    parallel.shard_counts = {name: layout.tp for name in names if model.cut(name) is not None}
    if stage is not None:
        if "lm_head.weight" in whole.shapes and "lm_head.weight" not in whole.dtypes:
            parallel.tied = frozenset((_EMBEDDING, "gpt.output_layer.weight"))
            for name, weight in model.named_parameters():
                if name in parallel.tied:
                    weight.tied_to = _EMBEDDING  # type: ignore[attr-defined]
        schedule = Pipeline(forward, stage, ranks)
        parallel.schedule = schedule
        parallel.reductions.append(lambda gradients: schedule.agree(gradients, parallel.tied))
    # A norm of heads is whole, and each rank uses it for its own heads.
    parallel.sum_over(ranks, "tp", {name for name in names if "q_layernorm" in name or "k_layernorm" in name})
    if layout.replicate > 1:
        replicate(ranks, parallel, "replicate")
    return parallel


class MegatronWeights(LocalWeights):
    """The weights of the checkpoint in the parameters of Megatron's layers, which fuse and pad them."""

    def __init__(self, model: MegatronModel, whole: WholeModel, ranks: Ranks) -> None:
        self._model, self._shapes = model, whole.shapes
        #: Weight of the checkpoint -> the parameters here that have some of it, and what.
        self._owners: dict[str, list[tuple[str, Block]]] = {}
        for parameter, blocks in model.blocks.items():
            for block in blocks:
                self._owners.setdefault(block.name, []).append((parameter, block))
        is_cut = ranks.mesh.layout.tp > 1
        axes = {name: owners[-1][1].cut for name, owners in self._owners.items()}
        here = {
            name: (whole.dtypes[name], (ShardedDim("tp", axis),) if is_cut and axis is not None else ())
            for name, axis in axes.items()
        }
        self.specs = whole.specs(here, ranks)

    def shards(self) -> Iterator[Shard]:
        for name, weight in self._model.named_parameters():
            for block in self._model.blocks[name]:
                yield Shard(block.name, block.shape, block.offset, block.of(weight.detach()))

    def load(self, shards: Iterable[Shard]) -> None:
        weights = {name: weight.detach() for name, weight in self._model.named_parameters()}
        blocks = {
            name: [(block.offset, block.of(weights[parameter])) for parameter, block in owners]
            for name, owners in self._owners.items()
        }
        fill_weights(blocks, shards, self._shapes, {}, "model")

    def state_shards(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Shard]:
        weights = dict(self._model.named_parameters())
        for full_name, tensor in tensors:
            name, _, key = full_name.rpartition(".")
            if tensor.shape == weights[name].shape:
                for block in self._model.blocks[name]:
                    yield Shard(f"{block.name}.{key}", block.shape, block.offset, block.of(tensor))
            else:
                for weight in dict.fromkeys(block.name for block in self._model.blocks[name]):
                    yield Shard.whole(f"{weight}.{key}", tensor)

    def local_state(self, shards: Iterable[Shard]) -> Iterator[Shard]:
        """The optimizer's state under the names of Megatron's parameters: of each shard, what is here."""
        weights = {name: weight.detach() for name, weight in self._model.named_parameters()}
        padded: set[str] = set()
        for shard in shards:
            name, _, key = shard.name.rpartition(".")
            if name not in self._shapes:
                raise CheckpointError(f"the optimizer state '{shard.name}' belongs to no trained weight of this model")
            for parameter, block in self._owners.get(name, ()):  # none: it is on another stage
                full_name, weight = f"{parameter}.{key}", weights[parameter]
                if shard.global_shape != block.shape:  # one value for the whole weight
                    yield Shard(full_name, shard.global_shape, shard.offset, shard.tensor)
                    continue
                shape = tuple(weight.shape)
                part = overlap(block.offset, block.of(weight), shard)[1]
                yield Shard(full_name, shape, block.local_offset(shard.offset), part)
                if (end := block.padding(shape)) is not None and full_name not in padded:
                    padded.add(full_name)
                    zeros = shard.tensor.new_zeros(shape[0] - end, *shape[1:])
                    yield Shard(full_name, shape, (end, *(0,) * (len(shape) - 1)), zeros)
