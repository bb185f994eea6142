"""`Controller`: one program that drives all workers, wherever they are: in this process, under torchrun, or
on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from verl._base.checked import checked, hinted
from verl._base.combinations import MAKE, check
from verl._base.record import Seconds
from verl._host.device import claimed, count
from verl._host.ranks import local_ranks, torchrun_ranks
from verl.cluster.group import RankGroup
from verl.cluster.placement import DeviceMesh, ResourcePool
from verl.cluster.rank_context import TIMEOUT, RoleMeshes
from verl.cluster.transport import Command, Transport, run
from verl.errors import ConfigError
from verl.models.lora import shape_of
from verl.rollout.options import SamplerOptions
from verl.training.options import TrainOptions, check_training, layout_of
from verl.training.torch_engine import rehearse
from verl.weights.layout import Layout, Mesh, generation_mesh

W = TypeVar("W")
_known: dict[tuple[Any, ...], Controller] = {}
_PLAIN = TrainOptions()


class Controller:
    """Where roles run, by one placement; which executor that takes follows from it.

    Under torchrun each rank of the job has a device, and without a placement every role runs on all of them. A plain
    script is one process on one device; a placement on several devices, or on nodes, takes Ray: the cluster that the
    script is connected to, else the one at `RAY_ADDRESS`, else one on this machine.

    Args:
        placement: role -> devices, see `DeviceMesh`; None: one device, or all ranks of the torchrun job.
        timeout: seconds that ranks wait for each other, and the controller for them; None: set by `wait`.

    Raises:
        ConfigError: the placement cannot be met; nothing has been started.
    """

    @checked
    def __init__(self, placement: Any = None, *, timeout: Seconds | None = None) -> None:
        self._may_change = timeout is None
        ranks = torchrun_ranks()
        #: The placement of each role; by default all roles on all ranks.
        self.mesh = DeviceMesh(ResourcePool.numbered(0, ranks) if placement is None else placement)
        first = self.mesh.devices[0]
        #: Where models run; a kind alone: on whichever device of that kind they are.
        self.device = first.kind if placement is None or first.kind != "cuda" else str(first)
        if ranks > 1:
            from verl.cluster.torchrun.transport import this_job

            for device in self.mesh.devices:
                if device.node or device.accelerator:
                    what = f"device {device} names a node or accelerator"
                    raise ConfigError(f"placement: {what}, which takes Ray, not torchrun")
            self.mesh.check({first.kind: ranks}, f"this torchrun job of {ranks} ranks")
            for index in range(local_ranks()):
                claimed.add(f"{first.kind}:{index}")
            job = this_job()
            if not job.has_started:  # until then the latest settings count
                job.kind, job.timeout = first.kind, job.timeout if timeout is None else timeout
            self.executor = "torchrun"
            self.transport: Transport = job
        elif len(self.mesh.devices) > 1 or first.node or first.accelerator:
            self.executor = "ray"
            self.transport = _ray_transport(self.mesh, TIMEOUT if timeout is None else timeout)
        else:
            if placement is not None:
                self.mesh.check({"cuda": count("cuda"), "cpu": first.index + 1}, "this machine")
            self.executor, self.transport = "local", Transport(self.device)
        #: Whether roles run in this process alone.
        self.is_local = self.executor == "local"
        #: Ranks in all.
        self.size = self.transport.size

    @classmethod
    def of(cls, placement: Any = None) -> Controller:
        """The controller of a placement: handles that are given equal placements share it, and so its processes.

        One that has ended stays with the handles that have it; the next ones get another.
        """
        if isinstance(placement, Controller):
            return placement
        key = torchrun_ranks(), None if placement is None else DeviceMesh(placement)
        if key not in _known or _known[key].transport.ended is not None:
            _known[key] = cls(placement)
        return _known[key]

    def group(
        self,
        role: str,
        recipe: partial[W],
        options: TrainOptions = _PLAIN,
        model: Any = None,
        rollout: SamplerOptions | None = None,
    ) -> RankGroup[W]:
        """The workers of a role.

        Args:
            recipe: makes one rank's worker: a `partial` of its class that lacks only `context`.
            options: how the role's ranks share its model.
            model: that model, with or without weights.
            rollout: how it generates, if it does.

        Raises:
            ConfigError: the settings, the ranks and the model do not go together; nothing has been started.
        """
        meshes = RoleMeshes(role, self.meshes(role, options, 1 if rollout is None else rollout.tensor_parallel))
        if model is not None:
            shape, trains, generates = shape_of(model), meshes.meshes["train"], meshes.meshes.get("rollout")
            asked = {"Ray": f"{MAKE}, or run in one process or under torchrun"} if self.executor == "ray" else {}
            others = f"all {self.size} ranks of a job, and '{role}' trains on {trains.size}"
            asked |= {"other ranks": others} if trains.size < self.size else {}
            check_training(options, trains.layout, shape, **asked)
            generation = {} if rollout is None else rollout.asked()
            if generates is not None:
                generates.layout.check(shape)
                check(generation | shape.asked())
            if not self.is_local:
                splits = 1 if generates is None else generates.layout.tp
                rehearse(model, options, trains.layout, splits=splits, rollout=generation)
        if self.is_local:
            claimed.add(self.device)
        return RankGroup(meshes, recipe, Transport(self.device) if self.is_local else self.transport)

    def meshes(self, role: str, options: TrainOptions = _PLAIN, generation_tp: int = 1) -> dict[str, Mesh]:
        """The ranks of a role by mesh, "train" and, of an actor, "rollout": on devices of its own if the placement says
        so.

        Args:
            generation_tp: ranks that share one copy of the actor in generation.

        Raises:
            ConfigError: the ranks cannot be shared so.
        """
        is_numbered, pool = self.executor == "torchrun", self.mesh.pool(role)
        rank_of = {device: device.index if is_numbered else i for i, device in enumerate(self.mesh.devices)}
        ranks = tuple(rank_of[device] for device in pool.devices)
        meshes = {"train": Mesh(ranks, layout_of(options, len(ranks), pool.parallel))}
        if role == "actor":
            ranks = tuple(rank_of[device] for device in self.mesh.pool("rollout").devices)
            if len(ranks) % generation_tp:
                raise ConfigError(
                    f"layout: rollout.tensor_model_parallel_size={generation_tp} does not divide the {len(ranks)} "
                    f"rank{'s' * (len(ranks) > 1)} that generate"
                )
            layout = Layout(replicate=len(ranks) // generation_tp, tp=generation_tp)
            trains = meshes["train"]
            is_strided = set(ranks) == set(trains.ranks) and not trains.layout.is_plain
            meshes["rollout"] = generation_mesh(trains, tg=generation_tp) if is_strided else Mesh(ranks, layout)
        return meshes

    def wait(self, seconds: float) -> None:
        """Set the timeout of ranks and controller, if none was given and the ranks have not started."""
        if self._may_change and not self.transport.has_started:
            self.transport.timeout = seconds

    def start(self) -> None:
        """Start or join the processes, which the first call does otherwise. On another rank of a torchrun job than the
        first it does not return: that rank serves the first one until its script ends."""
        self.transport.start()

    def everywhere(self, function: Callable[..., Any], *args: Any, each: Sequence[tuple[Any, ...]] = ()) -> list[Any]:
        """Call a function on every rank.

        Args:
            function: under torchrun a module-level one.
            args: the same for all ranks, as JSON has them.
            each: more arguments, one tuple a rank.

        Returns:
            The results, by rank.
        """
        commands = {rank: Command("run", (function, *args, *(each[rank] if each else ()))) for rank in range(self.size)}
        answers = dict(run(self.transport, commands, getattr(function, "__name__", "everywhere")))
        return [answers[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End the processes that were started on a Ray cluster; the end of this process does that, too."""
        if self.executor == "ray":
            self.transport.close()


def _ray_transport(mesh: DeviceMesh, timeout: float) -> Transport:
    try:
        from verl.cluster.ray.transport import RayTransport
    except ImportError as error:
        devices = mesh.devices
        raise ConfigError(
            f"placement: {len(devices)} devices ({', '.join(map(str, devices))}) need as many processes, and a plain "
            "script is one. Ray would start them: pip install 'ray>=2.59'; or start them with "
            f"torchrun --nproc_per_node={max(device.index for device in devices) + 1}"
        ) from error
    return RayTransport(mesh, timeout)


@hinted
def everywhere(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function on every rank: of the torchrun job, or of the Ray workers that this script has started; in a
    plain script on the only one. It counts as a call.

    Args:
        function: under torchrun a module-level one.
        args: as JSON has them.

    Returns:
        The results, by rank.

    Raises:
        ConfigError: there are several placements: call `Controller.everywhere` of one.
    """
    if torchrun_ranks() > 1:
        return Controller.of(None).everywhere(function, *args)
    started = [known for known in _known.values() if not known.is_local and known.transport.ended is None]
    if len(started) > 1:
        raise ConfigError(f"there are {len(started)} placements: call everywhere() of one of the controllers")
    return started[0].everywhere(function, *args) if started else [function(*args)]


def start() -> None:
    """For a call that needs no workers: under torchrun only rank 0 goes on with the script."""
    if torchrun_ranks() > 1:
        Controller.of(None).start()
