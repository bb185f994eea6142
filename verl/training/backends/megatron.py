"""The training engine on Megatron-LM's layers. Rows, losses, metrics, schedule and optimizer are those of
`TorchEngine`; the model and the pieces of its weights are its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.errors import CheckpointError
from verl.training.backends.megatron_model import Block, MegatronModel
from verl.training.optimizer import MixedPrecisionOptimizer
from verl.training.options import OptimConfig
from verl.training.parallel.data import replicate
from verl.training.parallel.pipeline import Pipeline
from verl.training.parallel.result import Parallel
from verl.training.parallel.stages import Stage
from verl.training.schedule import OneStage
from verl.training.torch_engine import TorchEngine
from verl.weights.shard import Cut, Shard
from verl.weights.shards import fill_weights, model_shards, named_weights, overlap

_EMBEDDING = "gpt.embedding.word_embeddings.weight"


class MegatronEngine(TorchEngine):
    """A `TrainEngine` of ranks that share a model: tensor and pipeline parallelism, and replicas of these.

    The model that is given is copied; its own tensors are not trained.

    Args: those of `TorchEngine`.

    Raises:
        ConfigError: megatron-core is not installed, or model, layout or options need another engine.
    """

    model: MegatronModel

    def _lay_out(self, weights: Callable[[Any], Iterable[Shard]] | None, *, trains: bool) -> None:
        forward, options, layout, given = self._forward, self.options, self.mesh.layout, self.model
        self._names = {name: weight.dtype for name, weight in named_weights(given)}
        self._shapes = {name: tuple(weight.shape) for name, weight in given.state_dict(keep_vars=True).items()}
        at = self.mesh.coordinate(self._ranks.rank)["pp"]
        stage = Stage(at, layout.pp, forward.packed.hidden_size, forward.packed.dtype) if layout.pp > 1 else None
        model = MegatronModel(forward, self._ranks, stage, checkpointing=options.gradient_checkpointing)
        model.requires_grad_(trains)
        self.model = forward.model = forward.packed = model  # type: ignore[assignment]
        forward.is_padded = False
        #: Weight of the checkpoint -> the parameters here that have some of it, and what.
        self._owners: dict[str, list[tuple[str, Block]]] = {}
        for parameter, blocks in model.blocks.items():
            for block in blocks:
                self._owners.setdefault(block.name, []).append((parameter, block))
        self._load((weights or model_shards)(given))
        self._parallel = self._cut(stage)
        self._schedule = self._parallel.schedule or OneStage(forward)
        self._specs = self._all_specs([*self._names])
        self._optimizer = None
        if trains:
            trained = dict(model.named_parameters())
            self._optimizer = MixedPrecisionOptimizer(
                trained, options.optim or OptimConfig(), is_scaled=forward.packed.dtype == torch.float16
            )

    def _cut(self, stage: Stage | None) -> Parallel:
        """What the steps need to know of the layout."""
        model, ranks, layout = self.model, self._ranks, self.mesh.layout
        parallel = Parallel(self.mesh, cut_dims=tuple(dim for dim in ("pp", "tp") if getattr(layout, dim) > 1))
        names = [name for name, _ in model.named_parameters()]
        parallel.pieces = {name: layout.tp for name in names if model.cut(name) is not None}
        if stage is not None:
            if "lm_head.weight" in self._shapes and "lm_head.weight" not in self._names:
                parallel.tied = frozenset((_EMBEDDING, "gpt.output_layer.weight"))
                for name, weight in model.named_parameters():
                    if name in parallel.tied:
                        weight.tied_to = _EMBEDDING  # type: ignore[attr-defined]
            schedule = Pipeline(self._forward, stage, ranks)
            parallel.schedule = schedule
            parallel.reductions.append(lambda gradients: schedule.agree(gradients, parallel.tied))
        # A norm of heads is whole, and each rank uses it for its own heads.
        if partial_sums := {name for name in names if "q_layernorm" in name or "k_layernorm" in name}:

            def all_reduce(tensors: Sequence[Tensor], op: Any) -> None:
                ranks.all_reduce(tensors, op, "tp")

            parallel.reductions.append(
                lambda gradients: gradients.sum_over_ranks(
                    all_reduce, [w for w in gradients.weights if w.name in partial_sums]
                )
            )
        if layout.replicate > 1:
            replicate(ranks, parallel, "replicate")
        return parallel

    def _own_specs(self) -> dict[str, tuple[str, tuple[Cut, ...]]]:
        is_cut = self.mesh.layout.tp > 1
        return {
            block.name: (
                str(self._names[block.name]).removeprefix("torch."),
                (Cut("tp", block.cut),) if is_cut and block.cut is not None else (),
            )
            for blocks in self.model.blocks.values()
            for block in blocks
        }

    def shards(self) -> Iterator[Shard]:
        for name, weight in self.model.named_parameters():
            for block in self.model.blocks[name]:
                yield Shard(block.name, block.shape, block.offset, block.of(weight.detach()))

    def merged_shards(self) -> Iterator[Shard]:
        return self.shards()

    def release_weight(self, name: str) -> int:
        """Nothing: pieces share the memory of Megatron's parameters."""
        return 0

    def _load(self, shards: Iterable[Shard]) -> None:
        weights = {name: weight.detach() for name, weight in self.model.named_parameters()}
        blocks = {
            name: [(block.offset, block.of(weights[parameter])) for parameter, block in owners]
            for name, owners in self._owners.items()
        }
        fill_weights(blocks, shards, self._shapes, {}, "model")

    def _state_shards(self) -> Iterator[Shard]:
        weights = dict(self.model.named_parameters())
        for full_name, tensor in self._trained().tensors():
            name, _, key = full_name.rpartition(".")
            if tensor.shape == weights[name].shape:
                for block in self.model.blocks[name]:
                    yield Shard(f"{block.name}.{key}", block.shape, block.offset, block.of(tensor))
            else:
                for found in dict.fromkeys(block.name for block in self.model.blocks[name]):
                    yield Shard.whole(f"{found}.{key}", tensor)

    def load_state(self, shards: Iterable[Shard], meta: Mapping[str, Any]) -> None:
        self._trained().load_state(self._renamed(shards), meta)

    def _renamed(self, shards: Iterable[Shard]) -> Iterator[Shard]:
        """The optimizer's state under the names of Megatron's parameters: of each shard, what is here."""
        weights = {name: weight.detach() for name, weight in self.model.named_parameters()}
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
                yield Shard(full_name, shape, block.place(shard.offset), part)
                if (end := block.padding(shape)) is not None and full_name not in padded:
                    padded.add(full_name)
                    zeros = shard.tensor.new_zeros(shape[0] - end, *shape[1:])
                    yield Shard(full_name, shape, (end, *(0,) * (len(shape) - 1)), zeros)
