"""`Controller`: one program that drives all workers, wherever they are: in this process, under torchrun, or
on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from verl import device
from verl.controller.group import SlotGroup, Slots, Workers
from verl.controller.local import LocalGroup
from verl.controller.placement import DeviceMesh, ResourcePool
from verl.controller.ranks import torchrun_ranks
from verl.controller.world import TIMEOUT, RoleMeshes
from verl.errors import ConfigError
from verl.hybrid.meshes import generation_mesh
from verl.layout import Layout, Mesh, ModelShape
from verl.training.options import TrainOptions, layout_of

W = TypeVar("W")
_known: dict[tuple[Any, ...], Controller] = {}
_PLAIN = TrainOptions()


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
        self._slots: Slots | None = None
        if placement is None:
            self.mesh = DeviceMesh(ResourcePool.numbered(0, ranks))
            #: Where models run; a kind alone: on whichever device of that kind they are.
            self.device = device.default_kind()
        else:
            self.mesh = DeviceMesh(placement)
            if self.is_local and (len(self.mesh.slots) > 1 or self.mesh.slots[0].is_named):
                self.executor, self._slots = "ray", _ray_slots(self.mesh, self.timeout)
            else:
                self._check(ranks)
            slot = self.mesh.slots[0]
            self.device = str(slot) if slot.kind == "cuda" else slot.kind
        if self.executor == "torchrun":
            from verl.controller.torchrun import torchrun_slots

            self._slots = torchrun_slots(timeout, self.mesh.slots[0].kind)

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
        return self._slots is not None and self._slots.has_ended

    def group(
        self,
        role: str,
        recipe: partial[W],
        options: TrainOptions = _PLAIN,
        shape: ModelShape = ModelShape(),  # noqa: B008  (frozen)
        generation_tp: int = 1,
    ) -> Workers[W]:
        """The workers of a role.

        Args:
            recipe: makes one rank's worker: a `partial` of its class that lacks only `place`.
            options: how the role's ranks share its model.
            shape: of that model.
            generation_tp: see `meshes`.

        Raises:
            ConfigError: the model or the ranks cannot have that layout.
        """
        meshes = self.meshes(role, options, generation_tp)
        for name, mesh in meshes.meshes.items():
            mesh.layout.check(shape, options.strategy if name == "train" else "")
        if self._slots is None:
            return LocalGroup(role, recipe, self.device, meshes.meshes)
        return SlotGroup(meshes, recipe, self._slots)

    def meshes(self, role: str, options: TrainOptions = _PLAIN, generation_tp: int = 1) -> RoleMeshes:
        """The ranks of a role by mesh. An actor also generates: on slots of its own if the map says so.

        Args:
            generation_tp: ranks that share one copy of the actor in generation.

        Raises:
            ConfigError: the ranks cannot be shared so.
        """
        own = self.mesh.pool(role)
        found = {"train": Mesh(self._ranks(own), layout_of(options, len(own), own.parallel))}
        if role == "actor":
            ranks = self._ranks(self.mesh.pools.get("rollout") or own)
            if len(ranks) % generation_tp:
                raise ConfigError(
                    f"layout: rollout.tensor_model_parallel_size={generation_tp} does not divide the {len(ranks)} "
                    f"rank{'s' * (len(ranks) > 1)} that generate"
                )
            layout = Layout(replicate=len(ranks) // generation_tp, tp=generation_tp)
            trains = found["train"]
            is_strided = set(ranks) == set(trains.ranks) and not trains.layout.is_plain
            found["rollout"] = generation_mesh(trains, tg=generation_tp) if is_strided else Mesh(ranks, layout)
        return RoleMeshes(role, found)

    def _ranks(self, pool: ResourcePool) -> tuple[int, ...]:
        slots = self.mesh.slots
        return tuple(slot.index if self.executor == "torchrun" else slots.index(slot) for slot in pool.slots)

    def wait(self, seconds: float) -> None:
        """Have ranks and controller wait so long for each other, where no `timeout` was given. Ranks that have met
        already go on with what they met with."""
        if self._may_change and not (self._slots is not None and self._slots.has_started):
            self.timeout = seconds
            if self._slots is not None:
                self._slots.timeout = seconds

    def start(self) -> None:
        """Start or join the processes at the slots, which the first verb does otherwise. On another rank of a torchrun
        job than the first it does not return: that rank serves the first one until its script ends."""
        if self._slots is not None:
            self._slots.start()

    def everywhere(self, function: Callable[..., Any], *args: Any, each: Sequence[tuple[Any, ...]] = ()) -> list[Any]:
        """Call a function on every rank.

        Args:
            function: under torchrun a module-level one.
            args: the same for all ranks, as JSON has them.
            each: more arguments, one tuple a rank.

        Returns:
            What it returned, by rank.
        """
        given = [(*args, *(each[rank] if each else ())) for rank in range(self.size)]
        if self._slots is None:
            return [function(*given[0])]
        return self._slots.everywhere(function, given)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return torchrun_ranks() if self.executor == "torchrun" else len(self.mesh.slots)

    def close(self) -> None:
        """End the processes that were started on a Ray cluster; the end of this process does that, too."""
        if self.executor == "ray" and self._slots is not None:
            self._slots.close()

    def _check(self, ranks: int) -> None:
        if self.is_local:
            self.mesh.check({"cuda": device.count("cuda"), "cpu": self.mesh.slots[0].index + 1}, "this machine")
            return
        if named := next((slot for slot in self.mesh.slots if slot.is_named), None):
            raise ConfigError(f"placement: slot {named} names a node or accelerator, which takes Ray, not torchrun")
        self.mesh.check({self.mesh.slots[0].kind: ranks}, f"this torchrun job of {ranks} ranks")


def _ray_slots(mesh: DeviceMesh, timeout: float) -> Slots:
    try:
        from verl.controller.ray import RaySlots
    except ImportError as error:
        slots = mesh.slots
        raise ConfigError(
            f"placement: {len(slots)} slots ({', '.join(map(str, slots))}) need as many processes, and a plain script "
            "is one. Ray would start them: pip install 'ray>=2.59'; or start them with "
            f"torchrun --nproc_per_node={max(slot.index for slot in slots) + 1}"
        ) from error
    return RaySlots(mesh, timeout)


def everywhere(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function on every rank: of the torchrun job, or of the Ray slots that this script has started; in a plain
    script on the only one. It counts as a verb.

    Args:
        function: under torchrun a module-level one.
        args: as JSON has them.

    Returns:
        What it returned, by rank.

    Raises:
        ConfigError: there are several sets of slots: call `Controller.everywhere` of one.
    """
    if torchrun_ranks() > 1:
        return Controller.of(None).everywhere(function, *args)
    started = [known for known in _known.values() if not (known.is_local or known.has_ended)]
    if len(started) > 1:
        raise ConfigError(f"there are {len(started)} sets of slots: call everywhere() of one of the controllers")
    return started[0].everywhere(function, *args) if started else [function(*args)]


def start() -> None:
    """For a verb that needs no workers: under torchrun only rank 0 goes on with the script."""
    if torchrun_ranks() > 1:
        Controller.of(None).start()
