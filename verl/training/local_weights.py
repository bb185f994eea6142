"""This rank's part of a model's weights: read, replaced, released while generation has them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import TypeAlias

import torch
from torch import Tensor, nn

from verl.errors import TrainingError
from verl.training.ranks import Ranks, gather_json
from verl.weights.shard import Shard, ShardedDim, WeightSpec, blocks_of, local_part, sharded_dims_of
from verl.weights.shards import fill_weights, load_model_shards, model_shards, named_weights

#: The dtype of a weight, and how it is cut.
Described: TypeAlias = tuple[torch.dtype, Sequence[ShardedDim]]


class LocalWeights(ABC):
    """This rank's part of a model's weights. Nothing communicates after construction.

    Attributes:
        specs: every weight of the model, by checkpoint name; equal on all ranks.
        released: weights whose memory is freed, and its bytes.
    """

    specs: dict[str, WeightSpec]
    released: Mapping[str, int] = {}

    @abstractmethod
    def shards(self) -> Iterator[Shard]:
        """See `TrainEngine.shards`."""

    @abstractmethod
    def load(self, shards: Iterable[Shard]) -> None:
        """See `TrainEngine.load_shards`; the optimizer's masters stay as they are."""

    def state_shards(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Shard]:
        """What an optimizer knows, "<parameter>.<state>", under the names of the weights, "<weight>.<state>". Each
        tensor is laid out like this rank's part of the parameter, or is one value for all of it."""
        return (Shard.whole(name, tensor) for name, tensor in tensors)

    def local_state(self, shards: Iterable[Shard]) -> Iterator[Shard]:
        """The inverse of `state_shards`: what of each shard belongs to this rank."""
        return iter(shards)

    # A back end whose weights share memory with what its library has flattened releases none.
    def release(self, name: str) -> int:
        """Free the memory of this rank's shard of a weight, whose values the caller holds from now on; until it is
        restored, whatever needs the weights raises `TrainingError`.

        Returns:
            Bytes freed; 0 where it keeps the shard: the live one is wider than `specs`, or shares its memory.
        """
        return 0

    def restore(self, name: str, shards: Iterable[Shard]) -> None:
        """Put a released weight, all shards of it, back to where it was.

        Raises:
            CheckpointError: a shard did not come whole.
        """
        raise TrainingError(f"'{name}' is not released")

    def check_present(self) -> None:
        """Raises TrainingError: some are released."""
        if self.released:
            first, more = next(iter(self.released)), len(self.released) - 1
            raise TrainingError(
                f"the memory of '{first}' and {more} more weights is released while the generation layout has them: "
                "release() the generation weights before the training engine is used"
            )


class WholeModel:
    """The names, shapes and dtypes of all weights of a model, noted before ranks keep their parts of it."""

    def __init__(self, model: nn.Module) -> None:
        #: By every name that a weight has: tied ones have several.
        self.shapes = {name: tuple(weight.shape) for name, weight in model.state_dict(keep_vars=True).items()}
        self.dtypes = {name: weight.dtype for name, weight in named_weights(model)}

    def specs(self, here: Mapping[str, Described], ranks: Ranks) -> dict[str, WeightSpec]:
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


class ModelWeights(LocalWeights):
    """The live tensors of a model of transformers. Those that ranks have parts of are DTensors.

    Args:
        whole: the model before it was laid out.
        dtypes: in which weights are served, by name; live ones may be wider.
    """

    def __init__(self, model: nn.Module, whole: WholeModel, dtypes: Mapping[str, torch.dtype], ranks: Ranks) -> None:
        self._model, self._shapes, self._dtypes = model, whole.shapes, dtypes
        here = {name: (dtypes.get(name, live.dtype), sharded_dims_of(live)) for name, live in named_weights(model)}
        self.specs = whole.specs(here, ranks)
        self.released: dict[str, int] = {}

    def shards(self) -> Iterator[Shard]:
        for shard in model_shards(self._model):
            dtype = self._dtypes.get(shard.name, shard.tensor.dtype)
            yield Shard(shard.name, shard.global_shape, shard.offset, shard.tensor.to(dtype))

    def load(self, shards: Iterable[Shard]) -> None:
        load_model_shards(self._model, shards, self._shapes)

    def release(self, name: str) -> int:
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
        weight = dict(named_weights(self._model))[name].detach()
        _storage(weight).resize_(self.released.pop(name))
        fill_weights({name: [*blocks_of(weight)]}, shards, self._shapes, {}, type(self._model).__name__)

    def state_shards(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Shard]:
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
        here = {name for name, _ in self._model.named_parameters()}
        elsewhere = self._shapes.keys() - here  # on other pipeline stages
        return (shard for shard in shards if shard.name.rpartition(".")[0] not in elsewhere)


def _storage(weight: Tensor) -> torch.UntypedStorage:
    return local_part(weight.detach()).untyped_storage()
