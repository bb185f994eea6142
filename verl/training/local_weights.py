"""This rank's part of a model's weights: read, replaced, released while generation has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from verl.errors import TrainingError
from verl.training.ranks import Ranks, gather_json
from verl.weights.shard import Shard, ShardedDim, WeightSpec, blocks_of, local_part, sharded_dims_of
from verl.weights.shards import fill_weights, named_weights, tied_names


class WholeModel:
    """The names, shapes and dtypes of all weights of a model, noted before ranks keep their parts of it."""

    def __init__(self, model: nn.Module) -> None:
        #: By every name that a weight has: tied ones have several.
        self.shapes = {name: tuple(weight.shape) for name, weight in model.state_dict(keep_vars=True).items()}
        self.dtypes = {name: weight.dtype for name, weight in named_weights(model)}

    def specs(
        self, here: Mapping[str, tuple[torch.dtype, Sequence[ShardedDim]]], ranks: Ranks
    ) -> dict[str, WeightSpec]:
        """The specs of all weights, on this pipeline stage and the others, in the order of the model. All stages call
        it together.

        Args:
            here: of the weights that this rank has parts of, the dtype and how they are cut.
        """
        json = {name: (str(dtype).removeprefix("torch."), dims) for name, (dtype, dims) in here.items()}
        stage = ranks.mesh.coordinate(ranks.rank)["pp"]
        stages = dict(sorted(gather_json((stage, json), ranks.group("pp")), key=itemgetter(0)))
        specs = {}
        for name in self.dtypes:
            holders = tuple(stage for stage, weights in stages.items() if name in weights)
            dtype, dims = stages[holders[-1]][name]
            sharded_dims = tuple(ShardedDim(*dim) for dim in dims)
            stage_holders = holders if len(stages) > 1 else ()
            specs[name] = WeightSpec(name, self.shapes[name], getattr(torch, dtype), sharded_dims, stage_holders)
        return specs


class LocalWeights:
    """This rank's part of a model's weights. Nothing communicates after construction.

    Here they are the live tensors of a model of transformers, those that ranks have parts of DTensors. A back end that
    holds them otherwise says how.

    Args:
        whole: the model before it was laid out.
        dtypes: in which weights are served, by name; live ones may be wider.

    Attributes:
        specs: every weight of the model, by checkpoint name; equal on all ranks.
        released: weights whose memory is freed, and its bytes.
    """

    def __init__(self, model: nn.Module, whole: WholeModel, dtypes: Mapping[str, torch.dtype], ranks: Ranks) -> None:
        self._shapes, self._dtypes = whole.shapes, dtypes
        self._model: Any = model
        here = {name: (dtypes.get(name, live.dtype), self.sharded_dims(live)) for name, live in named_weights(model)}
        self.specs = whole.specs(here, ranks)
        self.released: dict[str, int] = {}

    def sharded_dims(self, weight: Tensor) -> Sequence[ShardedDim]:
        """How a live weight is cut over ranks."""
        return sharded_dims_of(weight)

    def blocks(self, weight: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """The blocks of a live weight that this rank has: where each begins, and its elements."""
        return blocks_of(weight.detach())

    def shards(self) -> Iterator[Shard]:
        """See `TrainEngine.shards`."""
        for name, weight in named_weights(self._model):
            for offset, block in self.blocks(weight):
                yield Shard(name, self._shapes[name], offset, block.to(self.specs[name].dtype))

    def load(self, shards: Iterable[Shard]) -> None:
        """See `TrainEngine.load_shards`; the optimizer's masters stay as they are."""
        blocks = {name: [*self.blocks(weight)] for name, weight in named_weights(self._model)}
        fill_weights(blocks, shards, self._shapes, tied_names(self._model), type(self._model).__name__)

    def state_shards(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Shard]:
        """What an optimizer knows, "<parameter>.<state>", under the names of the weights, "<weight>.<state>". Each
        tensor is laid out like this rank's part of the parameter, or is one value for all of it."""
        # Of weights that are wider than they are served, the live pieces are the masters.
        weights = {name: weight for name, weight in self._model.named_parameters() if weight.requires_grad}
        wider = (name for name, weight in weights.items() if self._dtypes.get(name, weight.dtype) != weight.dtype)
        masters = ((f"{name}.master", local_part(weights[name].detach())) for name in wider)
        for name, tensor in chain(tensors, masters):
            weight = weights[name.rpartition(".")[0]]
            if sharded_dims_of(weight) and tensor.shape == local_part(weight).shape:
                for offset, block in blocks_of(weight, tensor):
                    yield Shard(name, tuple(weight.shape), offset, block)
            else:
                yield Shard.whole(name, tensor)
            del tensor  # a master that was made for the caller, before the next one is

    def local_state(self, shards: Iterable[Shard]) -> Iterator[Shard]:
        """The inverse of `state_shards`: what of each shard belongs to this rank."""
        here = {name for name, _ in self._model.named_parameters()}
        elsewhere = self._shapes.keys() - here  # on other pipeline stages
        return (shard for shard in shards if shard.name.rpartition(".")[0] not in elsewhere)

    def release(self, name: str) -> int:
        """Free the memory of this rank's shard of a weight, whose values the caller holds from now on; until it is
        restored, whatever needs the weights raises `TrainingError`.

        Returns:
            Bytes freed; 0 where it keeps the shard: the live one is wider than `specs`, or shares its memory.
        """
        weights = dict(named_weights(self._model))
        if not self.released:
            self._users = Counter(_storage(weight)._cdata for weight in weights.values())
        if name not in weights:  # an engine with parameters of its own kind
            return 0
        weight = weights[name].detach()
        local, storage = local_part(weight), _storage(weight)
        is_shared = self._users[storage._cdata] > 1 or (storage.nbytes() > local.nbytes and not sharded_dims_of(weight))
        if is_shared or not storage.resizable() or self.specs[name].dtype != local.dtype or not local.numel():
            return 0
        self.released[name] = storage.nbytes()
        storage.resize_(0)
        return local.nbytes

    def restore(self, name: str, shards: Iterable[Shard]) -> None:
        """Put a released weight, all shards of it, back to where it was.

        Raises:
            CheckpointError: a shard did not come whole.
        """
        weight = dict(named_weights(self._model))[name].detach()
        _storage(weight).resize_(self.released.pop(name))
        fill_weights({name: [*self.blocks(weight)]}, shards, self._shapes, {}, type(self._model).__name__)

    def check_present(self) -> None:
        """Raises TrainingError: some are released."""
        if self.released:
            first, more = next(iter(self.released)), len(self.released) - 1
            raise TrainingError(
                f"the memory of '{first}' and {more} more weights is released while the generation layout has them: "
                "release() the generation weights before the training engine is used"
            )


def _storage(weight: Tensor) -> torch.UntypedStorage:
    return local_part(weight.detach()).untyped_storage()
