"""The ranks of a mesh, seen from one of them: collectives along its dimensions, and how they share a model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from verl.training.gradients import Gradients, Weight
from verl.weights.layout import Mesh
from verl.weights.shard import buckets

if TYPE_CHECKING:
    from verl.training.engine import Schedule

_BUCKET_BYTES = 64 << 20


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
            for bucket in buckets(alike, attrgetter("nbytes"), _BUCKET_BYTES):  # a collective each
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
