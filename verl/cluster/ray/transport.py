"""Ranks on a Ray cluster: one process each, driven from here."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl._host.ray_session import START_DEADLINE, connect
from verl._host.user_functions import user_modules
from verl.cluster.placement import Device, DeviceMesh
from verl.cluster.ray.rank import RayRank, WorkerError
from verl.cluster.transport import Command, Event, Transport, run
from verl.errors import ClusterError, ConfigError
from verl.weights.shard import in_buckets

_LEAST_CPUS = 0.02
#: Bytes of arguments that travel within the call.
_INLINE = 1 << 16
_NODE_KEYS = ("NodeName", "NodeID", "NodeManagerAddress", "NodeManagerHostname")
_ACCELERATOR = "ray.io/accelerator-type"


class RayTransport(Transport):
    """The processes of one placement, started at the first use; its device i is rank i of their world. See `Transport`.

    The cluster is the one that this process is connected to, else the one at `RAY_ADDRESS`, else one that is started
    on this machine and ends with this process.

    Args:
        timeout: seconds for any call.

    Raises:
        ConfigError: the cluster does not have what the placement asks for; says what it has.
    """

    own_rank = -1

    def __init__(self, mesh: DeviceMesh, timeout: float) -> None:
        self.mesh, self.timeout, self.size = mesh, timeout, len(mesh.devices)
        self._lock = threading.RLock()  # commands reach all ranks in one order
        self._workers: list[Any] = []
        self._about: list[dict[str, Any]] = [{"host": "?", "pid": "?"}] * self.size
        self._group: PlacementGroup | None = None
        #: The last batch that was sent, and its reference: the calls of a step read the same one.
        self._put: tuple[Callable[[], Any], Any] = (lambda: None), None
        connect()
        self._kind = "GPU" if mesh.devices[0].kind == "cuda" else "CPU"
        nodes = [node for node in ray.nodes() if node["Alive"]]
        nodes.sort(key=lambda n: ("node:__internal_head__" not in n["Resources"], n["NodeName"], n["NodeID"]))
        self.devices_a_machine = int(max(node["Resources"].get(self._kind, 0) for node in nodes))
        self._selectors = [_selector(device, nodes) for device in mesh.devices]
        self._share = 1.0 if self._kind == "GPU" else _free_cpus(self.size)
        if self._kind == "GPU":
            gpus = int(ray.cluster_resources().get("GPU", 0))
            mesh.check({"cuda": gpus}, f"the Ray cluster of {len(nodes)} nodes")

    def start(self) -> None:
        """Start the processes and let them meet.

        Raises:
            ClusterError: what the placement asks for is taken by others, or a process does not start.
        """
        with self._lock:
            if self.has_started or self.ended is not None:
                return
            bundle, is_cuda = {self._kind: self._share}, self._kind == "GPU"
            strategy = "PACK" if is_cuda else "SPREAD"
            self._group = placement_group([bundle] * self.size, strategy, bundle_label_selector=self._selectors)
            if not self._group.wait(START_DEADLINE):
                remove_placement_group(self._group)
                has, free = (
                    ", ".join(f"{resources.get(name, 0):g} {name}s" for name in ("CPU", "GPU"))
                    for resources in (ray.cluster_resources(), ray.available_resources())
                )
                raise ClusterError(
                    f"placement: {self.size} devices with {bundle} each found no place on the Ray cluster within "
                    f"{START_DEADLINE:g} s: it has {has}, of which free: {free}"
                )
            actor_class = ray.remote(max_restarts=0, concurrency_groups={"watch": 1})(RayRank)
            share = {"num_gpus": 1, "num_cpus": 0} if is_cuda else {"num_cpus": self._share}
            for index in range(self.size):
                where = PlacementGroupSchedulingStrategy(self._group, index)
                self._workers.append(actor_class.options(scheduling_strategy=where, **share).remote())
            self.has_started = True
            self._meet("cuda:0" if is_cuda else "cpu")

    def _meet(self, device: str) -> None:
        """Let the ranks meet at a store that rank 0 opens: the port is its own from the beginning."""
        each = partial(run, self, what="start", timeout=START_DEADLINE)
        about = dict(each(dict.fromkeys(range(self.size), Command("about"))))
        self._about = [about[rank] for rank in range(self.size)]
        machines = [one["node"] for one in self._about]
        is_one = len(set(machines)) == 1
        ((_, port),) = each({0: Command("open_store", (is_one,))})
        meeting = "127.0.0.1" if is_one else self._about[0]["address"], port
        threads = [max(1, torch.get_num_threads() // machines.count(machine)) for machine in machines]
        joins = [(rank, machines, meeting, self.timeout, device, n, sys.path) for rank, n in enumerate(threads)]
        dict(each({rank: Command("join", args) for rank, args in enumerate(joins)}))

    def send(
        self, commands: Mapping[int, Command], what: str, first: Any = None, collective: bool = False
    ) -> tuple[dict[Any, int], None]:
        with self._lock:
            for module in user_modules.values():  # what comes of a user's own file, and is no module elsewhere
                ray.cloudpickle.register_pickle_by_value(module)
            if isinstance(first, Iterator):
                first = [ray.put(bunch) for bunch in in_buckets(first)]
            elif first is not None:
                if self._put[0]() is not first.table:
                    self._put = weakref.ref(first.table), ray.put(first)
                first = self._put[1]
            # What cannot travel is refused before the start. Several ranks may get the same; large arguments go through
            # the object store.
            shared: dict[int, Any] = {}
            for args in {id(command.args): command.args for command in commands.values()}.values():
                buffers: list[Any] = []
                pickled = ray.cloudpickle.dumps(args, buffer_callback=buffers.append)
                shared[id(args)] = ray.put(args) if buffers or len(pickled) > _INLINE else pickled
            self.start()
            if self.ended is not None:
                raise ClusterError(f"the ranks have been ended: {self.ended}")
            sent = {}
            for rank, (name, args, answers, rows) in commands.items():
                method = getattr(self._workers[rank], {"stacks": "watch", "stream": "stream"}.get(name, "carry_out"))
                sent[method.remote(name, shared[id(args)], answers, rows, first)] = rank
        return sent, None

    def receive(self, sent: dict[Any, int], seconds: float) -> list[Event]:
        done, _ = ray.wait([*sent], timeout=max(0.0, seconds)) if sent else ([], [])
        events = []
        for call in done:
            rank = sent[call]
            try:
                is_stream = isinstance(call, ray.ObjectRefGenerator)
                items = ray.get(next(call) if is_stream else call, timeout=START_DEADLINE)
                events += [Event(rank, "item", item) for item in items]
                if is_stream:
                    continue
                events.append(Event(rank, "end"))
            except StopIteration:
                events.append(Event(rank, "end"))
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                if isinstance(cause, WorkerError):
                    seen, trace = cause.args
                    seen.__cause__ = ClusterError(f"the worker's own traceback: {trace}")
                else:
                    seen = ClusterError(f"{self.who(rank)} failed: {error}")
                events.append(Event(rank, "error", seen))
            except ray.exceptions.RayError as error:
                events.append(Event(rank, "gone", " ".join(str(error).split())))
            del sent[call]
        return events

    def who(self, rank: int) -> str:
        about = self._about[rank]
        where = f"device {self.mesh.devices[rank]}, host {about['host']}, pid {about['pid']}"
        return f"rank {rank} of {self.size} ({where})"

    def close(self, reason: str = "close() was called") -> None:
        """End the processes and give what they took of the cluster back."""
        with self._lock:
            if self.ended is None:
                self.ended = reason
                for worker in self._workers:
                    ray.kill(worker)
                if self._group is not None:
                    remove_placement_group(self._group)


def _free_cpus(ranks: int) -> float:
    """The CPUs that each of some ranks on CPUs takes of the cluster."""
    # Half of what is free, so that a second placement and other work find a place.
    free = ray.available_resources().get("CPU", 0.0)
    share: float = min(1.0, free / 2 / ranks)
    if share < _LEAST_CPUS:
        raise ConfigError(
            f"placement: {ranks} cpu devices take {_LEAST_CPUS} CPUs each or more, and of the "
            f"{ray.cluster_resources().get('CPU', 0):g} CPUs of the Ray cluster {free:g} are free, half of which a "
            "placement may take"
        )
    return math.floor(share * 1e4) / 1e4  # the cluster's own precision


def _selector(device: Device, nodes: list[dict[str, Any]]) -> dict[str, str]:
    """The labels that select the nodes for a rank on this device."""
    matching, labels = nodes, {}
    if device.node:
        matching = [n for i, n in enumerate(nodes) if device.node in (str(i), *(n[key] for key in _NODE_KEYS))]
        if len(matching) != 1:
            known = ", ".join(f"{i} ({n['NodeName']})" for i, n in enumerate(nodes))
            raise ConfigError(f"placement: device {device} names no one node of the Ray cluster; it has {known}")
        labels["ray.io/node-id"] = matching[0]["NodeID"]
    if device.accelerator:
        kinds = {n["Labels"].get(_ACCELERATOR, "none") for n in matching}
        if device.accelerator not in kinds:
            raise ConfigError(
                f"placement: device {device} wants accelerator {device.accelerator}, and the Ray cluster has: "
                f"{', '.join(sorted(kinds))}"
            )
        labels[_ACCELERATOR] = device.accelerator
    if device.kind == "cuda" and device.node and device.index >= (count := int(matching[0]["Resources"].get("GPU", 0))):
        raise ConfigError(f"placement: device {device} is not there: node {device.node} has {count} GPUs")
    return labels
