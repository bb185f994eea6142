"""Ranks on a Ray cluster: one process each, driven from here.

A call's batch is put into the object store once and each rank takes its rows of it. The first failure ends the wait:
the others may be waiting for that rank. Ranks that may have come apart are ended, never used again.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl._host.ray_session import START_DEADLINE, connect
from verl._host.user_functions import user_modules
from verl.batch import Batch
from verl.cluster.group import GRACE, NO_ANSWER, Call, died, raise_cause, stalled
from verl.cluster.placement import Device, DeviceMesh
from verl.cluster.rank_context import RoleMeshes
from verl.cluster.ray.rank import RayRank, Stream, WorkerError
from verl.errors import ClusterError, ConfigError
from verl.weights.shard import in_buckets

_LEAST_CPUS = 0.02
_NODE_KEYS = ("NodeName", "NodeID", "NodeManagerAddress", "NodeManagerHostname")
_ACCELERATOR = "ray.io/accelerator-type"


class RayJob:
    """The processes of one placement, started at the first use; its device i is rank i of their world.

    The cluster is the one that this process is connected to, else the one at `RAY_ADDRESS`, else one that is started
    on this machine and ends with this process.

    Args:
        timeout: seconds for any call.

    Raises:
        ConfigError: the cluster does not have what the placement asks for; says what it has.
    """

    def __init__(self, mesh: DeviceMesh, timeout: float) -> None:
        self.mesh, self.timeout = mesh, timeout
        self.lock = threading.RLock()  # calls reach all ranks in one order
        self._keys = count()
        self.ended: str | None = None
        self._workers: list[Any] = []
        self._about: list[dict[str, Any]] = []
        self._group: PlacementGroup | None = None
        #: The batch that was put into the object store last, and its reference.
        self._put: tuple[Any, Any] = (lambda: None, None)
        connect()
        self._cpus = _check(mesh)

    @property
    def has_started(self) -> bool:
        return bool(self._workers)

    @property
    def devices_a_machine(self) -> int:
        kind = "GPU" if self.mesh.devices[0].kind == "cuda" else "CPU"
        return int(max(node["Resources"].get(kind, 0) for node in _nodes()))

    def start(self) -> None:
        """Start the processes and let them meet.

        Raises:
            ClusterError: what the placement asks for is taken by others, or a process does not start.
        """
        with self.lock:
            if self._workers or self.ended is not None:
                return
            kind = self.mesh.devices[0].kind
            nodes = _nodes()
            bundle = {"GPU": 1.0} if kind == "cuda" else {"CPU": self._cpus}
            selectors = [_selector(device, nodes) for device in self.mesh.devices]
            strategy = "PACK" if kind == "cuda" else "SPREAD"
            self._group = placement_group([bundle] * len(selectors), strategy, bundle_label_selector=selectors)
            if not self._group.wait(START_DEADLINE):
                remove_placement_group(self._group)
                raise ClusterError(
                    f"placement: {len(selectors)} devices with {bundle} each found no place on the Ray cluster within "
                    f"{START_DEADLINE:g} s: it has {_amounts(ray.cluster_resources())}, of which free: "
                    f"{_amounts(ray.available_resources())}"
                )
            actor_class = ray.remote(max_restarts=0, concurrency_groups={"watch": 1})(RayRank)
            for index in range(len(selectors)):
                where = PlacementGroupSchedulingStrategy(self._group, index)
                share = {"num_gpus": 1, "num_cpus": 0} if kind == "cuda" else {"num_cpus": self._cpus}
                self._workers.append(actor_class.options(scheduling_strategy=where, **share).remote())
            self._meet("cuda:0" if kind == "cuda" else "cpu")

    def _meet(self, device: str) -> None:
        """Let the ranks meet at a store that rank 0 opens: the port is its own from the beginning."""
        import torch

        self._about = [{"host": "?", "pid": "?"}] * len(self._workers)
        self._about = self.each("about", [()] * len(self._workers), "start", START_DEADLINE)
        machines = [about["node"] for about in self._about]
        is_one = len(set(machines)) == 1
        port = self.gather({self.submit(0, "open_store", is_one): 0}, "start", timeout=START_DEADLINE)[0]
        meeting = "127.0.0.1" if is_one else self._about[0]["address"], port
        threads = [max(1, torch.get_num_threads() // machines.count(machine)) for machine in machines]
        arguments = [(rank, machines, meeting, self.timeout, device, n, sys.path) for rank, n in enumerate(threads)]
        self.each("join", arguments, "start", START_DEADLINE)

    def each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], what: str, timeout: float | None = None
    ) -> list[Any]:
        """A method of every rank, with the arguments of each; the answers."""
        with self.lock:
            self.start()
            calls = {self.submit(rank, method, *args): rank for rank, args in enumerate(arguments)}
        answers = self.gather(calls, what, timeout=timeout)
        return [answers[index] for index in range(len(arguments))]

    def make(self, recipe: partial[Any], role: RoleMeshes) -> int:
        with self.lock:
            _own_files_by_value()
            key, shared = next(self._keys), ray.put(recipe)  # what cannot travel is refused before the start
            self.start()
            self.each("make", [(key, shared, role)] * len(self.mesh.devices), f"{role.role}.start")
            return key

    def everywhere(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        _own_files_by_value()
        return self.each("run", [(function, args) for args in arguments], getattr(function, "__name__", "everywhere"))

    def run(self, call: Call) -> Iterator[tuple[int, Any]]:
        calls = self._begin(call)
        if not call.is_stream:
            yield from self.gather(calls, call.what, safe=call.is_independent).items()
            return
        for rank, item in self.stream(calls, call.what):
            yield from ((rank, shard) for shard in item) if isinstance(item, list) else ((rank, item),)

    def _begin(self, call: Call) -> dict[Any, int]:
        """The references of a call's ranks, in their order."""
        with self.lock:
            _own_files_by_value()
            first = call.args[0] if call.args else None
            beside: list[Any] = []
            if isinstance(first, Batch):
                if self._put[0]() is not first.table:  # several calls of a step, one after the other, read the same one
                    self._put = weakref.ref(first.table), ray.put(first)
                beside = [self._put[1]]
            elif isinstance(first, Iterator):
                beside = [Stream([ray.put(bunch) for bunch in in_buckets(first)])]
            args, method = call.args[len(beside) :], "stream" if call.is_stream else "call"
            calls = {}
            for rank, rows in call.rows.items():
                order = (call.role, call.method, args, call.kwargs), rows, rank in call.answering
                calls[self.submit(rank, method, ray.cloudpickle.dumps(order), *beside)] = rank
        return calls

    def submit(self, rank: int, method: str, *args: Any) -> Any:
        """Begin a call; hold the lock where several ranks are called."""
        if self.ended is not None:
            raise ClusterError(f"the ranks have been ended: {self.ended}")
        return getattr(self._workers[rank], method).remote(*args)

    def gather(
        self, calls: Mapping[Any, int], what: str, safe: bool = False, timeout: float | None = None
    ) -> dict[int, Any]:
        """The answers of several ranks.

        Args:
            calls: reference -> rank.
            what: "ROLE.METHOD", for messages.
            safe: a failure of some ranks does not set them apart from the others.
            timeout: seconds; None: `self.timeout`.
        """
        answers, pending, limit = {}, list(calls), timeout or self.timeout
        until = time.monotonic() + limit
        with suppress(ray.exceptions.RayError):  # to wait for all at once is cheapest; who failed is asked below
            return dict(zip(calls.values(), ray.get(pending, timeout=min(limit, GRACE)), strict=True))
        while pending:
            (call, *_), pending = self._next(pending, calls, what, until - time.monotonic(), limit)
            with self._failing(call, calls, what, safe):
                answers[calls[call]] = ray.get(call, timeout=START_DEADLINE)
        return answers

    def stream(self, calls: Mapping[Any, int], what: str) -> Iterator[tuple[int, Any]]:
        """What several ranks yield, with the rank, as it comes; each may take `self.timeout` seconds for an item."""
        pending = list(calls)
        try:
            while pending:
                done, _ = self._next(pending, calls, what, self.timeout, self.timeout)
                for call in done:
                    with self._failing(call, calls, what, safe=False):
                        try:
                            yield calls[call], ray.get(next(call), timeout=START_DEADLINE)
                        except StopIteration:
                            pending.remove(call)
        finally:
            for call in pending if self.ended is None else ():  # who stopped listening must not leave ranks waiting
                deque(call, maxlen=0)

    def _next(
        self, pending: list[Any], calls: Mapping[Any, int], what: str, wait: float, limit: float
    ) -> tuple[list[Any], list[Any]]:
        done, rest = ray.wait(pending, timeout=max(0.0, wait))
        if not done:
            raise stalled(self, sorted(calls[call] for call in rest), what, limit)
        return done, rest

    @contextmanager
    def _failing(self, call: Any, calls: Mapping[Any, int], what: str, safe: bool) -> Iterator[None]:
        """Inside, the failure of a rank is raised as the user sees it. The other ranks have `GRACE` seconds to end
        too; if they do not, or if some went on and others not, all ranks are ended."""
        try:
            yield
        except ray.exceptions.RayError as error:
            failed = {calls[call]: error}
            others = {
                other.completed() if isinstance(other, ray.ObjectRefGenerator) else other: rank
                for other, rank in calls.items()
                if other is not call
            }
            done, late = ray.wait(list(others), num_returns=len(others), timeout=GRACE) if others else ([], [])
            for other in done:
                try:
                    ray.get(other, timeout=START_DEADLINE)
                except ray.exceptions.RayError as their:
                    failed[others[other]] = their
            alive = all(isinstance(e, ray.exceptions.RayTaskError) for e in failed.values())
            errors = {rank: self._as_seen(rank, error, what) for rank, error in failed.items()}
            is_broken = not alive or not (safe or len(failed) == len(calls))
            raise_cause(self, errors, [others[other] for other in late], what, is_broken)

    def _as_seen(self, rank: int, error: Exception, what: str) -> Exception:
        """The failure of a rank as the user sees it."""
        cause = getattr(error, "cause", None)
        if isinstance(cause, WorkerError):
            cause.error.__cause__ = ClusterError(f"the worker's own traceback: {cause.trace}")
            return cause.error
        if isinstance(error, ray.exceptions.RayTaskError):
            return ClusterError(f"{self.who(rank)} failed in '{what}': {error}")
        return died(self.who(rank), f"in '{what}'", _line(error))

    def who(self, rank: int) -> str:
        """A rank, for messages."""
        about = self._about[rank]
        where = f"device {self.mesh.devices[rank]}, host {about['host']}, pid {about['pid']}"
        return f"rank {rank} of {len(self._workers)} ({where})"

    def stacks(self) -> dict[int, str]:
        calls = [worker.stacks.remote() for worker in self._workers]
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=GRACE)
        stacks: dict[int, str] = {}
        for rank, call in enumerate(calls):
            try:
                stacks[rank] = ray.get(call, timeout=START_DEADLINE) if call in done else NO_ANSWER
            except ray.exceptions.RayError as error:
                stacks[rank] = _line(error)
        return stacks

    def close(self, reason: str = "close() was called") -> None:
        """End the processes and give what they took of the cluster back."""
        with self.lock:
            if self.ended is None:
                self.ended = reason
                for worker in self._workers:
                    ray.kill(worker)
                if self._group is not None:
                    remove_placement_group(self._group)


def _check(mesh: DeviceMesh) -> float:
    """Compare a placement with the cluster; the CPUs that a rank on a CPU takes of it."""
    nodes = _nodes()
    for device in mesh.devices:
        _selector(device, nodes)
    total = ray.cluster_resources()
    if mesh.devices[0].kind == "cuda":
        mesh.check({"cuda": int(total.get("GPU", 0))}, f"the Ray cluster of {len(nodes)} nodes")
        return 0.0
    # Half of what is free, so that a second placement and other work find a place.
    free, count = ray.available_resources().get("CPU", 0.0), len(mesh.devices)
    share: float = min(1.0, free / 2 / count)
    if share < _LEAST_CPUS:
        raise ConfigError(
            f"placement: {count} cpu devices take {_LEAST_CPUS} CPUs each or more, and of the {total.get('CPU', 0):g} "
            f"CPUs of the Ray cluster {free:g} are free, half of which a placement may take"
        )
    return math.floor(share * 1e4) / 1e4  # the cluster's own precision


def _nodes() -> list[dict[str, Any]]:
    """The living nodes of the cluster, the head first."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return sorted(alive, key=lambda n: ("node:__internal_head__" not in n["Resources"], n["NodeName"], n["NodeID"]))


def _selector(device: Device, nodes: list[dict[str, Any]]) -> dict[str, str]:
    """The labels of the nodes that a rank may stand on."""
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


def _own_files_by_value() -> None:
    """What comes of a user's own file, and is no module elsewhere, travels by value."""
    for module in user_modules.values():
        ray.cloudpickle.register_pickle_by_value(module)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}s" for name in ("CPU", "GPU"))
