"""The ranks of a mesh, seen from one of them: collectives along its dimensions, how they share a model, and its part
of the weights: read, replaced, released while generation has them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from verl.errors import TrainingError
from verl.training.gradients import Gradients, Weight
from verl.weights.layout import Mesh
from verl.weights.shard import Blocks, Shard, ShardedDim, WeightSpec, blocks_of, buckets, local_part, sharded_dims_of
from verl.weights.shards import fill_weights, named_weights, tied_names

if TYPE_CHECKING:
    from verl.training.engine import Schedule


class Ranks:
    """Collectives over subgroups of a mesh, each joined by the ranks that differ from this one along some dimensions.

    Args:
        group: the process group of all ranks of the mesh; None for a mesh of one rank.
        parts: the process groups of the mesh's `parts`, by ranks. Without them members create a group at its first use;
            torch names it by the number of groups that they created before, which must be equal.
    """

    def __init__(self, mesh: Mesh, group: Any = None, parts: Mapping[tuple[int, ...], Any] | None = None) -> None:
        self.mesh, self._all = mesh, group
        self.rank = mesh.ranks[0] if group is None else dist.get_rank()
        self._groups: dict[tuple[int, ...], Any] = {**(parts or {}), tuple(sorted(mesh.ranks)): group}
        self._device_mesh: DeviceMesh | None = None

    def group(self, *dims: str) -> Any:
        """The process group along these dimensions; None where this rank is alone. All its ranks come here together."""
        members = () if self._all is None else tuple(sorted(self.mesh.group(self.rank, *dims)))
        if len(members) < 2:
            return None
        if members not in self._groups:
            timeout = self._all._get_backend(self._all._device_types[0]).options._timeout
            self._groups[members] = dist.new_group(list(members), timeout, use_local_synchronization=True)
        return self._groups[members]

    def all_reduce(self, tensors: Sequence[Tensor], op: Any, dims: Sequence[str]) -> None:
        """Combine tensors of one shape on every rank along some dimensions, in place."""
        group = self.group(*dims)
        if group is None:
            return
        for _, alike in groupby(tensors, attrgetter("dtype")):
            for bucket in buckets(alike, attrgetter("nbytes"), 64 << 20):  # a collective each
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat, op, group=group)
                for tensor, piece in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                    tensor.copy_(piece.view_as(tensor))

    def device_mesh(self, device: torch.device, *dims: str) -> DeviceMesh:
        """Dimensions of several ranks as torch has them, outermost first. All are slices of one mesh, so that torch can
        put two of them together. All ranks come here together."""
        if self._device_mesh is None:
            every = {dim: size for dim, size in self.mesh.layout.sizes.items() if size > 1}
            ranks = torch.tensor(self.mesh.ranks).view(*every.values())
            groups = [self.group(dim) for dim in every]
            self._device_mesh = DeviceMesh.from_group(
                groups if len(every) > 1 else groups[0],
                device.type,
                ranks if len(every) > 1 else None,
                mesh_dim_names=tuple(every),
            )
        return self._device_mesh if dims == self._device_mesh.mesh_dim_names else self._device_mesh[dims]


@dataclass
class Parallel:
    """How the ranks share a model: filled in by the functions of `verl.training.parallel`, one after the other.

    Attributes:
        mesh: the ranks that share the model.
        dtypes: of this rank's weights before, by name; live weights may be wider.
        schedule: of micro-batches; None: one after the other.
        tied: weights that the first and the last pipeline stage both hold.
        reductions: what adds this rank's gradient sums up over other ranks, in this order, after the last backward pass
            of a step.
        cut_dims: mesh dimensions along which ranks have different pieces of gradients.
        shard_counts: of weights that are no DTensors, but of which ranks along `cut_dims` have shards: how many.
        lockstep: a forward has collectives of ranks with different rows, so all must run equally many forwards.
    """

    mesh: Mesh
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    schedule: Schedule | None = None
    tied: frozenset[str] = frozenset()
    reductions: list[Callable[[Gradients], None]] = field(default_factory=list)
    cut_dims: tuple[str, ...] = ()
    shard_counts: dict[str, int] = field(default_factory=dict)
    lockstep: bool = False

    def sum_over(self, ranks: Ranks, dims: Callable[[Weight], tuple[str, ...]]) -> None:
        """Add gradients up over ranks along `dims` of each weight, of which these have a summand each."""

        def reduce(gradients: Gradients) -> None:
            for over in sorted({dims(weight) for weight in gradients.weights} - {()}):
                weights = [weight for weight in gradients.weights if dims(weight) == over]
                gradients.sum_over_ranks(partial(ranks.all_reduce, dims=over), weights)

        self.reductions.append(reduce)

    def replication(self, weight: Weight) -> int:
        """How many ranks along `cut_dims` hold the same piece of a weight, this one included."""
        stages = 2 if weight.name in self.tied else 1
        ranks: int = stages * math.prod(getattr(self.mesh.layout, dim) for dim in self.cut_dims if dim != "pp")
        source: Any = weight.source
        placements = enumerate(getattr(source, "placements", ()))
        shards: int = math.prod(source.device_mesh.size(dim) for dim, cut in placements if hasattr(cut, "dim"))
        return ranks // self.shard_counts.get(weight.name, shards)


def gather_json(value: Any, group: Any) -> list[Any]:
    """The JSON value of every rank of a group, in its order. JSON, because bytes from a socket are never unpickled."""
    if group is None:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([len(text)])
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    longest = int(max(sizes))
    texts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(texts, torch.nn.functional.pad(text, (0, longest - len(text))), group=group)
    return [json.loads(bytes(text[: int(size)].tolist())) for text, size in zip(texts, sizes, strict=True)]


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
        keeps_memory: no weight has memory of its own that could be freed.
    """

    keeps_memory: ClassVar[bool] = False

    def __init__(self, model: nn.Module, whole: WholeModel, dtypes: Mapping[str, torch.dtype], ranks: Ranks) -> None:
        self._shapes = whole.shapes
        self._model: Any = model
        here = {name: (dtypes.get(name, live.dtype), self.sharded_dims(live)) for name, live in named_weights(model)}
        self.specs = whole.specs(here, ranks)
        self.released: dict[str, int] = {}

    def sharded_dims(self, weight: Tensor) -> Sequence[ShardedDim]:
        """How a live weight is cut over ranks."""
        return sharded_dims_of(weight)

    def blocks(self, weight: Tensor) -> Blocks:
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
        wider = (name for name, weight in weights.items() if self.specs[name].dtype != weight.dtype)
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
        if self.keeps_memory:
            return 0
        weights = dict(named_weights(self._model))
        if not self.released:
            self._users = Counter(local_part(w.detach()).untyped_storage()._cdata for w in weights.values())
        weight = weights[name].detach()
        local = local_part(weight)
        storage = local.untyped_storage()
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
        local_part(weight).untyped_storage().resize_(self.released.pop(name))
        fill_weights({name: [*self.blocks(weight)]}, shards, self._shapes, {}, type(self._model).__name__)

    def check_present(self) -> None:
        """Raises TrainingError: some are released."""
        if self.released:
            first, more = next(iter(self.released)), len(self.released) - 1
            raise TrainingError(
                f"the memory of '{first}' and {more} more weights is released while the generation layout has them: "
                "release() the generation weights before the training engine is used"
            )
