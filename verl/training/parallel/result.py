"""What the engine needs to know of a model that was parallelised."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from verl.training.gradients import Gradients, Weight
from verl.training.ranks import Ranks
from verl.weights.layout import Mesh

if TYPE_CHECKING:
    from verl.training.runner import Schedule


@dataclass
class Parallel:
    """Filled in by the functions of this package, one after the other.

    Attributes:
        mesh: the ranks that share the model.
        dtypes: of this rank's weights before, by name; live weights may be wider.
        schedule: of micro-batches; None: one after the other.
        tied: weights that the first and the last pipeline stage both hold.
        reductions: what adds this rank's gradient sums up over other ranks, in this order, after the last backward pass
            of a step.
        cut_dims: mesh dimensions along which ranks have different pieces of gradients.
        shard_counts: of weights that are no DTensors, but of which ranks along `cut_dims` have shards: how many.
        in_step: a forward has collectives of ranks with different rows, so all must run equally many.
    """

    mesh: Mesh
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    schedule: Schedule | None = None
    tied: frozenset[str] = frozenset()
    reductions: list[Callable[[Gradients], None]] = field(default_factory=list)
    cut_dims: tuple[str, ...] = ()
    shard_counts: dict[str, int] = field(default_factory=dict)
    in_step: bool = False

    def sum_over(self, ranks: Ranks, dim: str, names: Collection[str]) -> None:
        """Add the gradients of these weights, of which each rank along `dim` has a summand, up over them."""
        if names:
            self.reductions.append(
                lambda gradients: gradients.sum_over_ranks(
                    ranks.along(dim), [weight for weight in gradients.weights if weight.name in names]
                )
            )

    def copies(self, weight: Weight) -> int:
        """Of the ranks along `cut_dims`, how many hold the same piece of a weight as this one."""
        stages = 2 if weight.name in self.tied else 1
        ranks: int = stages * math.prod(getattr(self.mesh.layout, dim) for dim in self.cut_dims if dim != "pp")
        source: Any = weight.source
        placements = enumerate(getattr(source, "placements", ()))
        shards: int = math.prod(source.device_mesh.size(dim) for dim, cut in placements if hasattr(cut, "dim"))
        return ranks // self.shard_counts.get(weight.name, shards)
