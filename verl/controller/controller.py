"""`Controller`: one program that drives all workers, wherever they are: in this process, under torchrun, or
on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from verl import device
from verl.controller.group import WorkerGroup
from verl.controller.local import LocalGroup
from verl.controller.placement import DeviceMesh, ResourcePool
from verl.controller.ranks import torchrun_ranks
from verl.controller.world import TIMEOUT, Layout, World, has_joined, here
from verl.errors import ConfigError

W = TypeVar("W")
_known: dict[tuple[Any, ...], Controller] = {}


class Controller:
    """Where roles run, by one map; which executor that takes follows from it.

    Under torchrun the ranks of the job are the slots, and without a map every role stands on all of them. A plain
    script is one process, which is one slot; a map of several, or of nodes, takes Ray: the cluster that the script is
    connected to, else the one at `RAY_ADDRESS`, else one on this machine.

    Args:
        placement: role -> slots, see `DeviceMesh`; None: one slot, or all ranks of the torchrun job.
        timeout: seconds that ranks wait for each other, and the controller for them; None: those of `wait`.

    Raises:
        ConfigError: the map cannot be met; nothing has been started.
    """

    def __init__(self, placement: Any = None, *, timeout: float | None = None) -> None:
        self.timeout = TIMEOUT if timeout is None else timeout
        self._may_change = timeout is None
        ranks = torchrun_ranks()
        self.executor = "torchrun" if ranks > 1 else "local"
        self._slots: Any = None
        if placement is None:
            self.mesh = DeviceMesh(ResourcePool.numbered(0, ranks))
            #: Where models run; a kind alone: on whichever device of that kind they are.
            self.device = device.default_kind()
        else:
            self.mesh = DeviceMesh(placement)
            if self.is_local and (len(self.mesh.slots) > 1 or self.mesh.slots[0].is_named):
                self.executor, self._slots = "ray", _slots(self.mesh, self.timeout)
            else:
                self._check(ranks)
            slot = self.mesh.slots[0]
            self.device = str(slot) if slot.kind == "cuda" else slot.kind

    @classmethod
    def of(cls, placement: Any = None) -> Controller:
        """The controller of a map: handles that are given equal maps share it, and so the processes at its slots.

        One that has ended stays with the handles that have it; the next ones get another.
        """
        if isinstance(placement, Controller):
            return placement
        key = (torchrun_ranks(), None if placement is None else DeviceMesh(placement))
        if key not in _known or _known[key].has_ended:
            _known[key] = cls(placement)
        return _known[key]

    @property
    def is_local(self) -> bool:
        """Whether roles run in this process alone."""
        return self.executor == "local"

    @property
    def has_ended(self) -> bool:
        """Whether the processes at its slots were ended, by `close` or by a failure."""
        return self.executor == "ray" and self._slots.has_ended

    def group(self, role: str, recipe: partial[W]) -> WorkerGroup[W]:
        """The workers of a role.

        Args:
            recipe: makes one rank's worker: a `partial` of its class that lacks only `place`.
        """
        if self.executor == "local":
            return LocalGroup(role, recipe, self.device, self.layout(role).meshes)
        if self.executor == "ray":
            from verl.controller.ray import RayGroup

            return RayGroup(role, recipe, self.layout(role), self._slots)
        from verl.controller.torchrun import TorchrunGroup

        return TorchrunGroup(role, recipe, self.layout(role), self.world)

    def layout(self, role: str) -> Layout:
        """The world ranks of a role by mesh. An actor also generates: on slots of its own if the map says so."""
        meshes = {"train": self._ranks(self.mesh.pool(role))}
        if role == "actor":
            meshes["rollout"] = self._ranks(self.mesh.pools.get("rollout") or self.mesh.pool(role))
        return Layout(role, meshes)

    def _ranks(self, pool: ResourcePool) -> tuple[int, ...]:
        slots = self.mesh.slots
        return tuple(slot.index if self.executor == "torchrun" else slots.index(slot) for slot in pool.slots)

    def wait(self, seconds: float) -> None:
        """Have ranks and controller wait so long for each other, where no `timeout` was given. Ranks that have met
        already go on with what they met with."""
        has_met = self._slots.has_started if self.executor == "ray" else has_joined()
        if self._may_change and not has_met:
            self.timeout = seconds
            if self.executor == "ray":
                self._slots.timeout = seconds

    def start(self) -> None:
        """Start or join the processes at the slots, which the first verb does otherwise."""
        if self.executor == "torchrun":
            self.world()
        elif self.executor == "ray":
            self._slots.start()

    def each(self, function: Callable[..., Any], given: Callable[[int], Any]) -> None:
        """Call a function at each slot of a Ray cluster, with what `given` is for its rank."""
        if self.executor == "ray":
            count = len(self.mesh.slots)
            self._slots.each("run", [(function, given(rank)) for rank in range(count)], function.__name__)

    def close(self) -> None:
        """End the processes that were started on a Ray cluster; the end of this process does that, too."""
        if self.executor == "ray":
            self._slots.close()

    def world(self) -> World:
        """This rank's side of the torchrun job; joined at the first use."""
        return here(self.timeout, self.mesh.slots[0].kind)

    def _check(self, ranks: int) -> None:
        kinds = {slot.kind for slot in self.mesh.slots}
        if self.is_local:
            self.mesh.check({"cuda": device.count("cuda"), "cpu": self.mesh.slots[0].index + 1}, "this machine")
            return
        if named := next((slot for slot in self.mesh.slots if slot.is_named), None):
            raise ConfigError(f"placement: slot {named} names a node or accelerator, which takes Ray, not torchrun")
        if len(kinds) > 1:
            found = " and ".join(sorted(kinds))
            raise ConfigError(f"placement: the slots of a torchrun job are of one kind, got {found}")
        self.mesh.check(dict.fromkeys(kinds, ranks), f"this torchrun job of {ranks} ranks")


def _slots(mesh: DeviceMesh, timeout: float) -> Any:
    try:
        from verl.controller.ray import Slots
    except ImportError as error:
        slots = mesh.slots
        raise ConfigError(
            f"placement: {len(slots)} slots ({', '.join(map(str, slots))}) need as many processes, and a plain script "
            "is one. Ray would start them: pip install 'ray>=2.59'; or start them with "
            f"torchrun --nproc_per_node={max(slot.index for slot in slots) + 1}"
        ) from error
    return Slots(mesh, timeout)
