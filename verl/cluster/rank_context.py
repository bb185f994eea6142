"""The place of a worker among the ranks of its role, and what its calls say about their data.

A role has two meshes (`verl.weights.layout.Mesh`): "train" and "rollout", on the same ranks or on others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

from verl._base.names import check_known
from verl.errors import ConfigError, nearest
from verl.weights.layout import Layout, Mesh

F = TypeVar("F", bound=Callable[..., Any])

Split = Literal["rows", "whole"]
Collect = Literal["rows", "first", "batches", "shards", "none"]
# What can be collected, by how the data are split.
_COLLECTS: dict[str, tuple[str, ...]] = {"rows": ("rows", "batches", "none"), "whole": ("first", "shards", "none")}
#: Seconds that ranks wait for each other when nothing else is set.
TIMEOUT = 1800.0
#: What is collected item by item.
STREAMS = ("batches", "shards")
#: The mesh of all ranks of a role.
ROLE = "role"
#: Key of the process group that weights move over on their way from training to generation, while others compute.
WEIGHTS = "weights"


class RankContext(NamedTuple):
    """A worker's rank, device and process groups; the default is a role of one rank.

    Attributes:
        role: its role, for messages.
        rank, size: among the ranks of the role.
        device: where its tensors live; None: where the model is.
        meshes: the role's meshes with this rank, by name; `Mesh` has the ranks of the whole job.
        trainer: the rank, in the role, of the first one that trains.
        groups: torch process groups of meshes with several ranks, by name; `WEIGHTS` if the ranks generate in another
            layout than they train in.
        parts: torch process groups along dimensions of a mesh, by their ranks, ascending.
    """

    role: str = ""
    rank: int = 0
    size: int = 1
    device: str | None = None
    trainer: int = 0
    meshes: Mapping[str, Mesh] = MappingProxyType({ROLE: Mesh(), "train": Mesh(), "rollout": Mesh()})
    groups: Mapping[str, Any] = MappingProxyType({})
    parts: Mapping[tuple[int, ...], Any] = MappingProxyType({})

    @property
    def is_apart(self) -> bool:
        """Whether some ranks of the role generate with weights that others train."""
        return any(mesh.size < self.size for mesh in self.meshes.values())


#: A role of one rank.
ALONE = RankContext()


@dataclass(frozen=True)
class RoleMeshes:
    """The meshes of one role by name, on ranks of the job. "train" and "rollout" may hold the same ranks, or others.

    Raises:
        ConfigError: ranks of a mesh that share a model do not ascend, see `Mesh.check_order`.
    """

    role: str
    meshes: Mapping[str, Mesh]

    def __post_init__(self) -> None:
        for mesh in self.meshes.values():
            mesh.check_order()

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the role, in order."""
        return tuple(sorted({rank for mesh in self.meshes.values() for rank in mesh.ranks}))

    @property
    def has_transition(self) -> bool:
        """Whether its ranks generate in another layout than they train in."""
        trains, generates = self.meshes["train"], self.meshes.get("rollout")
        if generates is None or set(trains.ranks) != set(generates.ranks):
            return False
        return not (trains.layout.is_plain and generates.layout.is_plain)

    def mesh(self, name: str) -> Mesh:
        """A mesh by name; `ROLE`: all ranks of the role."""
        return Mesh(tuple(self.ranks), Layout(replicate=len(self.ranks))) if name == ROLE else self.meshes[name]


class Dispatch(NamedTuple):
    """How a call's data travel.

    mesh: whose ranks run it.
    split: "rows": the first argument, a `Batch` and not by keyword, is cut by rows, balanced by tokens, one part for
        each data-parallel index; "whole": every rank gets all of it.
    collect: "rows": answers are batches, put back into the order of the rows; "first": the answer of the first rank;
        "batches": the call yields batches of finished rows, passed on as they come; "shards": every rank yields the
        same stream and the first one's counts; "none": nothing comes back.
    """

    mesh: str = ROLE
    split: Split = "whole"
    collect: Collect = "first"


def dispatch(mesh: str = ROLE, *, split: Split = "whole", collect: Collect = "first") -> Callable[[F], F]:
    """Declare that a controller may call a worker's method on all ranks of `mesh`.

    Raises:
        ConfigError: such answers cannot be collected, or the method is async.
    """

    def declare(method: F) -> F:
        name = getattr(method, "__qualname__", method)
        check_known(f"call '{name}': there is no split", [split], _COLLECTS)
        if collect not in _COLLECTS[split]:
            known = ", ".join(f"'{way}'" for way in _COLLECTS[split])
            raise ConfigError(f"call '{name}': of split='{split}', collect='{collect}' cannot be made: give {known}")
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            raise ConfigError(f"call '{name}' is async, and ranks call plain functions: use asyncio.run inside of one")
        method.__dispatch__ = Dispatch(mesh, split, collect)  # type: ignore[attr-defined]
        return method

    return declare


def dispatch_of(worker: type, name: str) -> Dispatch:
    """The declaration of a worker's method.

    Raises:
        ConfigError: a controller cannot call it.
    """
    method = getattr(worker, name, None)
    declared = getattr(method, "__dispatch__", None)
    if declared is None:
        known = [n for n in dir(worker) if hasattr(getattr(worker, n), "__dispatch__")]
        raise ConfigError(
            f"{worker.__name__} has no method '{name}' that a controller may call: {nearest(name, known)}"
        )
    return declared  # type: ignore[no-any-return]
