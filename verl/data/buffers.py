"""Buffers: queues of samples between rollout and training.

Every buffer returns a sample that `add` took from `drain` exactly once, oldest first, and drops nothing to make room.
`disk` does so across a crash: what `add` returned from is there, what `drain` returned is not returned again. (Training
is exactly once across a crash by the checkpoint: it stores `state()`, and `load_state` restores it.)
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable
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
#: Seconds that the actor of a distributed buffer may take to answer.
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
        batch = self.state()
        self.load_state(batch.slice(0, 0))
        return batch

    def state(self) -> Batch:
        """The samples that wait, in order."""

    def load_state(self, batch: Batch) -> None:
        """Replace the content by these samples."""


def check_room(buffer: Buffer, batch: Batch, *, saved: bool = False) -> None:
    """Raises DataError for samples that do not fit: with the buffer's own, or, if they are `saved` ones, alone."""
    if saved and len(batch) > buffer.capacity:
        raise DataError(f"{len(batch)} saved samples do not fit a buffer of {buffer.capacity}: raise buffer_size")
    if not saved and len(batch) > buffer.room:
        raise DataError(
            f"{len(batch)} samples do not fit: {len(buffer)} of {buffer.capacity} places are taken. "
            "Drain first, or raise buffer_size"
        )


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
        check_room(self, batch)
        if len(batch):
            self._batches.append(batch)

    def state(self) -> Batch:
        return Batch.concat(self._batches)

    def load_state(self, batch: Batch) -> None:
        check_room(self, batch, saved=True)
        self._batches = [batch] if len(batch) else []


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
        #: Release the lock; this object cannot be used afterwards.
        self.close = weakref.finalize(self, lock.close)
        clear_staging(self.path)
        cursor = self.path / "cursor.json"
        try:
            first = read_json(cursor, _Cursor).segment if cursor.exists() else 0
        except ValueError as error:
            raise DataError(f"{cursor} is damaged: {error}. Remove the directory to start an empty buffer") from None
        self._sizes: dict[Path, int] = {}
        files = sorted(self.path.glob("[0-9]*.parquet"))
        for file in files:
            if int(file.stem) < first:
                file.unlink()
                continue
            try:  # reading it all is the only check that finds a damaged page
                self._sizes[file] = len(Batch.from_parquet(file))
            except DataError as error:
                logger.warning("segment skipped: %s", error)
        self._next = max([first, *(int(file.stem) + 1 for file in files)])

    def __len__(self) -> int:
        return sum(self._sizes.values())

    def add(self, batch: Batch) -> None:
        check_room(self, batch)
        self._append(batch)

    def state(self) -> Batch:
        return Batch.concat(map(Batch.from_parquet, self._sizes))

    def load_state(self, batch: Batch) -> None:
        check_room(self, batch, saved=True)
        old = list(self._sizes)
        self._append(batch)
        if old:  # are drained at once by the cursor, and then their files go
            self._write("cursor.json", json.dumps({"segment": int(old[-1].stem) + 1}))
        for file in old:
            del self._sizes[file]
            file.unlink(missing_ok=True)

    def _append(self, batch: Batch) -> None:
        if not len(batch):
            return
        name, sink = f"{self._next:012d}.parquet", pa.BufferOutputStream()
        pq.write_table(batch.table, sink, compression="zstd", write_page_checksum=True)
        self._write(name, sink.getvalue().to_pybytes())
        self._sizes[self.path / name] = len(batch)
        self._next += 1

    def _write(self, name: str, content: str | bytes) -> None:
        if not self.close.alive:
            raise DataError(f"the buffer in {self.path} has been closed, and may be another's now: make a new one")
        write_atomic(self.path / name, content)


class _Cursor(BaseModel):
    """`cursor.json`: the first segment that has not been drained."""

    segment: int = Field(ge=0, lt=2**53)


class DistributedBuffer(Buffer):
    """A buffer that the workers of several nodes share: a `MemoryBuffer` in an actor of Ray. Every process of a Ray
    cluster that names the same buffer has the same one.

    The samples outlive the process that added them, and are gone with the actor; `state()` in a checkpoint is what
    brings them back.

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
        actor = ray.remote(MemoryBuffer).options(name=name, namespace="verl", get_if_exists=True, num_cpus=0)
        self._actor: Any = actor.remote(capacity)
        self.capacity = self._ask(lambda buffer: buffer.capacity)

    def __len__(self) -> int:
        return int(self._ask(len))

    def add(self, batch: Batch) -> None:
        self._ask(lambda buffer, data: buffer.add(Batch.from_ipc(data)), batch.to_ipc())

    def drain(self) -> Batch:
        return Batch.from_ipc(self._ask(lambda buffer: buffer.drain().to_ipc()))

    def state(self) -> Batch:
        return Batch.from_ipc(self._ask(lambda buffer: buffer.state().to_ipc()))

    def load_state(self, batch: Batch) -> None:
        self._ask(lambda buffer, data: buffer.load_state(Batch.from_ipc(data)), batch.to_ipc())

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return self._ray.get(self._actor.__ray_call__.remote(call, *args), timeout=DEADLINE)
        except self._ray.exceptions.RayError as error:
            if isinstance(cause := getattr(error, "cause", None), DataError):  # of the buffer itself
                raise cause from None
            raise ClusterError(f"the distributed buffer does not answer, or its node is gone: {error}") from error
