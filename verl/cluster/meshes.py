"""Which ranks of a job a role stands on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from verl.cluster.rank_context import ROLE
from verl.weights.layout import Mesh


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
        return Mesh.data_parallel(self.ranks) if name == ROLE else self.meshes[name]
