"""Buffers: queues of samples between rollout and training.

Every buffer returns a sample that `add` took from `drain` exactly once, oldest first, and drops nothing to make room.
`disk` does so across a crash: what `add` returned from is there, what `drain` returned is not returned again. (Training
is exactly once across a crash by the checkpoint: it stores `state()`, and `load_state` restores it.)
"""

from __future__ import annotations

import json
import logging
import weakref
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field

from verl._base.checked import checked
from verl._base.durable import clear_staging, lock_file, read_json, write_atomic
from verl._host.ray_session import connect
from verl.batch import Batch
from verl.errors import ClusterError, ConfigError, DataError, nearest, shown

logger = logging.getLogger(__name__)

#: Most samples that a buffer holds.
Capacity = Annotated[int, Field(ge=1, le=2**62)]
#: Seconds that the ledger's actor or the samples of a node may take to answer.
DEADLINE = 60.0


@runtime_checkable
class Buffer(Protocol):
    """A queue of samples. `capacity` and `len` are in samples; `room` is how many more `add` takes."""

    capacity: int

    @property
    def room(self) -> int:
        return self.capacity - len(self)

    def __len__(self) -> int: ...

    def add(self, batch: Batch) -> None:
        """Take the samples in. Raises DataError if there is no room for all of them; then none is taken."""

    def drain(self) -> Batch:
        """Give out the samples that wait, in order."""

    def state(self) -> Batch:
        """The samples that wait, in order."""

    def load_state(self, batch: Batch) -> None:
        """Replace the content by these samples."""


def no_room(buffer: Buffer, batch: Batch) -> DataError:
    """The error about samples that a buffer has no room for now."""
    return DataError(
        f"{len(batch)} samples do not fit: {len(buffer)} of {buffer.capacity} places are taken. "
        "Drain first, or raise buffer_size"
    )


def check_saved(buffer: Buffer, batch: Batch) -> None:
    """Raises DataError for saved samples that are more than a buffer's capacity."""
    if len(batch) > buffer.capacity:
        raise DataError(f"{len(batch)} saved samples do not fit a buffer of {buffer.capacity}: raise buffer_size")


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
        return DiskBuffer(path, capacity)
    if kind == "distributed":
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


class DiskBuffer(Buffer):
    """A directory of Parquet segments, one an `add`, and a cursor file: the first that has not been drained.

    Segments and cursor are replaced atomically; the cursor moves before `drain` returns. One buffer at a time, until it
    is closed or gone; a second one is refused.
    A segment that cannot be read when the buffer is opened is left where it is and skipped with a warning.
    """

    @checked
    def __init__(self, path: str | Path, capacity: Capacity) -> None:
        self.path, self.capacity = Path(path), capacity
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = lock_file(self.path / "lock")
        except OSError as error:
            raise ConfigError(f"the buffer cannot lie in {path}: {error}. Name another directory") from error
        if lock is None:
            raise DataError(
                f"the buffer in {path} is open already, in another process or in this one: end that process, close() "
                "that buffer (of a trainer: trainer.buffer.close()), or use another path"
            )
        self._unlock = weakref.finalize(self, lock.close)
        clear_staging(self.path)
        self._first = self._read_cursor()
        self._sizes: dict[int, int] = {}
        numbers = sorted(int(file.stem) for file in self.path.glob("[0-9]*.parquet"))
        for number in numbers:
            if number < self._first:
                self._file(number).unlink()
                continue
            try:  # reading it all is the only check that finds a damaged page
                self._sizes[number] = len(Batch.from_parquet(self._file(number)))
            except DataError as error:
                logger.warning("segment skipped: %s", error)
        self._next = max([self._first, *(number + 1 for number in numbers)])

    def __len__(self) -> int:
        return sum(self._sizes.values())

    def add(self, batch: Batch) -> None:
        if len(batch) > self.room:
            raise no_room(self, batch)
        self._append(batch)

    def drain(self) -> Batch:
        batch = self.state()
        if self._sizes:
            self._move_cursor(max(self._sizes) + 1)
            self._forget(list(self._sizes))
        return batch

    def state(self) -> Batch:
        return Batch.concat(Batch.from_parquet(self._file(number)) for number in self._sizes)

    def load_state(self, batch: Batch) -> None:
        check_saved(self, batch)
        old = list(self._sizes)
        start = self._next
        self._append(batch)
        self._move_cursor(start)
        self._forget(old)

    def close(self) -> None:
        """Release the lock; this object cannot be used afterwards."""
        self._unlock()

    def _append(self, batch: Batch) -> None:
        if not len(batch):
            return
        self._check_open()
        number, sink = self._next, pa.BufferOutputStream()
        pq.write_table(batch.table, sink, compression="zstd", write_page_checksum=True)
        write_atomic(self._file(number), sink.getvalue().to_pybytes())
        self._sizes[number] = len(batch)
        self._next = number + 1

    def _file(self, number: int) -> Path:
        return self.path / f"{number:012d}.parquet"

    def _read_cursor(self) -> int:
        file = self.path / "cursor.json"
        try:
            return read_json(file, _Cursor).segment if file.exists() else 0
        except ValueError as error:
            raise DataError(f"{file} is damaged: {error}. Remove the directory to start an empty buffer") from None

    def _check_open(self) -> None:
        if not self._unlock.alive:
            raise DataError(f"the buffer in {self.path} has been closed, and may be another's now: make a new one")

    def _move_cursor(self, segment: int) -> None:
        self._check_open()
        write_atomic(self.path / "cursor.json", json.dumps({"segment": segment}))
        self._first = segment

    def _forget(self, numbers: list[int]) -> None:
        for number in numbers:
            del self._sizes[number]
            self._file(number).unlink(missing_ok=True)


class _Cursor(BaseModel):
    """`cursor.json`: the first segment that has not been drained."""

    segment: int = Field(ge=0, lt=2**53)


class DistributedBuffer(Buffer):
    """A buffer that the workers of several nodes share: one actor owns the samples, as Ray objects, and knows their
    order. Every process of a Ray cluster that names the same buffer has the same one.

    They outlive the process that added them, and are gone with the actor's node; `state()` in a checkpoint is what
    brings them back. A process that drains gets references, and takes the samples from the object store.

    Args:
        capacity: samples; the process that creates it decides.
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
