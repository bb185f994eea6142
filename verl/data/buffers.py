"""Buffers: queues of samples between rollout and training.

Every buffer returns a sample that `add` took from `drain` exactly once, oldest first, and drops nothing to make room.
`disk` does so across a crash: what `add` returned from is there, what `drain` returned is not returned again. (Training
is exactly once across a crash by the checkpoint: it stores `state()`, and `load_state` restores it.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl.batch import Batch
from verl.checked import checked
from verl.data.buffer import Buffer, Capacity, no_room
from verl.errors import ConfigError, nearest, shown

__all__ = ["Buffer", "MemoryBuffer", "make_buffer"]


def make_buffer(kind: Any, capacity: int, path: str | Path | None = None) -> Buffer:
    """The buffer `kind`: "memory", "disk" (in the directory `path`), "distributed" (`DistributedBuffer`, named by
    `path`), or an instance, which is passed through.

    Raises:
        ConfigError: no such kind, no buffer, or "disk" without a path.
    """
    if not isinstance(kind, str):
        if not isinstance(kind, Buffer):
            kinds = "'memory', 'disk', 'distributed' or a Buffer"
            raise ConfigError(f"buffer is {kinds}, not {shown(kind)} (a size: buffer_size)")
        return kind
    if kind == "memory":
        return MemoryBuffer(capacity)
    if kind == "disk":
        if path is None:
            raise ConfigError("a disk buffer needs a directory: give its path")
        from verl.data.disk_buffer import DiskBuffer

        return DiskBuffer(path, capacity)
    if kind == "distributed":
        from verl.data.distributed_buffer import DistributedBuffer

        return DistributedBuffer(capacity, str(path or "verl-buffer"))
    raise ConfigError(f"there is no buffer '{kind}': {nearest(kind, ('memory', 'disk', 'distributed'))}")


class MemoryBuffer(Buffer):
    """A queue of batches in this process."""

    @checked
    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._batches: list[Batch] = []

    def __len__(self) -> int:
        return sum(map(len, self._batches))

    def add(self, batch: Batch) -> None:
        if len(batch) > self.room:
            raise no_room(self, batch)
        if len(batch):
            self._batches.append(batch)

    def drain(self) -> Batch:
        batch = self.state()
        self._batches.clear()
        return batch

    def state(self) -> Batch:
        return Batch.concat(self._batches)

    def load_state(self, batch: Batch) -> None:
        self._batches.clear()
        self.add(batch)
