"""`Controller`: one program that drives all workers, wherever they are: in this process, or under torchrun."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, TypeVar

from verl.controller.group import WorkerGroup
from verl.controller.local import LocalGroup
from verl.controller.once import rank_here, torchrun_ranks
from verl.controller.placement import DeviceMesh, ResourcePool, cuda_devices
from verl.controller.world import TIMEOUT, Layout, World
from verl.errors import ConfigError

W = TypeVar("W")
_known: dict[tuple[Any, ...], Controller] = {}
# One world a process, however many maps there are.
_worlds: list[World] = []


class Controller:
    """Where roles run, by one map; which executor that takes follows from it.

    Under torchrun the ranks of the job are the slots, and without a map every role stands on all of them. A plain
    script is one process, which is one slot.

    Args:
        placement: role -> slots, see `DeviceMesh`; None: one slot, or all ranks of the torchrun job.
        timeout: seconds that ranks wait for each other, and the controller for them.

    Raises:
        ConfigError: the map cannot be met; nothing has been started.
    """

    def __init__(self, placement: Any = None, *, timeout: float = TIMEOUT) -> None:
        self.timeout = timeout
        ranks = torchrun_ranks()
        self.executor = "torchrun" if ranks > 1 else "local"
        if placement is None:
            self.mesh = DeviceMesh(ResourcePool.numbered(0, ranks))
            self._device: str | None = None
        else:
            self.mesh = DeviceMesh(placement)
            self._check(ranks)
            slot = self.mesh.slots[0]
            self._device = str(slot) if slot.kind == "cuda" else slot.kind

    @classmethod
    def of(cls, placement: Any = None) -> Controller:
        """The controller of a map: handles that are given equal maps share it, and so the processes at its slots."""
        if isinstance(placement, Controller):
            return placement
        key = (torchrun_ranks(), None if placement is None else DeviceMesh(placement))
        if key not in _known:
            _known[key] = cls(placement)
        return _known[key]

    @property
    def is_local(self) -> bool:
        """Whether roles run in this process alone."""
        return self.executor == "local"

    def group(self, role: str, recipe: partial[W]) -> WorkerGroup[W]:
        """The workers of a role.

        Args:
            recipe: makes one rank's worker: a `partial` of its class that lacks only `place`.
        """
        if self.executor == "local":
            return LocalGroup(role, recipe, self._device)
        from verl.controller.torchrun import TorchrunGroup

        return TorchrunGroup(role, recipe, self.layout(role), self.world)

    def layout(self, role: str) -> Layout:
        """The world ranks of a role by mesh. An actor also generates: on slots of its own if the map says so."""
        meshes = {"train": tuple(slot.index for slot in self.mesh.pool(role).slots)}
        if role == "actor":
            pool = self.mesh.pools.get("rollout") or self.mesh.pool(role)
            meshes["rollout"] = tuple(slot.index for slot in pool.slots)
        return Layout(role, meshes)

    def world(self) -> World:
        """This rank's side of the torchrun job; joined at the first use."""
        if not _worlds:
            is_cuda = self.mesh.slots[0].kind == "cuda"
            device = f"cuda:{os.environ.get('LOCAL_RANK', rank_here())}" if is_cuda else "cpu"
            _worlds.append(World(rank_here(), torchrun_ranks(), "env://", self.timeout, device))
        return _worlds[0]

    def _check(self, ranks: int) -> None:
        slots, kinds = self.mesh.slots, {slot.kind for slot in self.mesh.slots}
        if len(slots) > 1 and self.is_local:
            raise ConfigError(
                f"placement: {len(slots)} slots ({', '.join(map(str, slots))}) need as many processes, and a plain "
                f"script is one: start it with torchrun --nproc_per_node={max(slot.index for slot in slots) + 1}"
            )
        if self.is_local:
            self.mesh.check({"cuda": cuda_devices(), "cpu": slots[0].index + 1}, "this machine")
            return
        if len(kinds) > 1:
            found = " and ".join(sorted(kinds))
            raise ConfigError(f"placement: the slots of a torchrun job are of one kind, got {found}")
        self.mesh.check(dict.fromkeys(kinds, ranks), f"this torchrun job of {ranks} ranks")
