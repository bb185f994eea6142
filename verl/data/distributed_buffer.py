"""A buffer that the workers of several nodes share: one actor owns the samples, as Ray objects, and knows their order.

They outlive the process that added them, and are gone with the actor's node; `state()` in a checkpoint is what brings
them back. A process that drains gets references, and takes the samples from the object store.
"""

from __future__ import annotations

from typing import Any

from verl.batch import Batch
from verl.checked import checked
from verl.data.buffer import Buffer, Capacity, check_saved, no_room
from verl.errors import ClusterError
from verl.ray_session import connect

#: Seconds that the ledger's actor or the samples of a node may take to answer.
DEADLINE = 60.0


class DistributedBuffer(Buffer):
    """See `Buffer`. Every process of a Ray cluster that names the same buffer has the same one.

    Args:
        capacity: samples; that of the process which made it holds.
        name: in the cluster's namespace.

    Raises:
        ConfigError: Ray is not installed, or the capacity is below 1.
        ClusterError: there is no Ray cluster, see `cluster.connect`.
    """

    @checked
    def __init__(self, capacity: Capacity, name: str = "verl-buffer") -> None:
        self._ray = ray = connect()
        actor = ray.remote(_Ledger).options(name=name, namespace="verl", get_if_exists=True, num_cpus=0)
        self._ledger: Any = actor.remote(capacity)
        self.capacity: int = self._ask("capacity")

    def __len__(self) -> int:
        return int(self._ask("size"))

    def add(self, batch: Batch) -> None:
        if len(batch) and not self._ask("add", batch.to_ipc(), len(batch)):
            raise no_room(self, batch)

    def drain(self) -> Batch:
        return self._fetched(self._ask("drain"))

    def state(self) -> Batch:
        return self._fetched(self._ask("parts"))

    def load_state(self, batch: Batch) -> None:
        check_saved(self, batch)
        self._ask("replace", batch.to_ipc(), len(batch))

    def _fetched(self, references: list[Any]) -> Batch:
        return Batch.concat(map(Batch.from_ipc, self._get(references)))

    def _ask(self, method: str, *args: Any) -> Any:
        return self._get(getattr(self._ledger, method).remote(*args))

    def _get(self, references: Any) -> Any:
        try:
            return self._ray.get(references, timeout=DEADLINE)
        except self._ray.exceptions.RayError as error:
            raise ClusterError(
                f"the distributed buffer does not answer, or its samples' node is gone: {error}"
            ) from error


class _Ledger:
    """Which samples wait, in their order: references, and how many each has. One call at a time, so all or nothing."""

    def __init__(self, capacity: int) -> None:
        import ray

        self._put = ray.put
        self._capacity = capacity
        self._parts: list[tuple[Any, int]] = []

    def capacity(self) -> int:
        return self._capacity

    def size(self) -> int:
        return sum(count for _, count in self._parts)

    def parts(self) -> list[Any]:
        return [reference for reference, _ in self._parts]

    def add(self, data: bytes, count: int) -> bool:
        if self.size() + count > self._capacity:
            return False
        self._parts.append((self._put(data), count))
        return True

    def drain(self) -> list[Any]:
        taken = self.parts()
        self._parts.clear()
        return taken

    def replace(self, data: bytes, count: int) -> None:
        self._parts = [(self._put(data), count)] if count else []
