"""A buffer that all ranks of a torchrun job share: it lies outside of the processes, and rank 0 alone touches it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.batch import Batch
from verl.controller.once import on_main
from verl.controller.ranks import torchrun_ranks
from verl.data.buffers import Buffer, make_buffer


def open_buffer(kind: str | Buffer, capacity: int, path: str | Path) -> Buffer:
    """`make_buffer`. Of one by name outside of this process, all ranks get what rank 0 is told."""
    if torchrun_ranks() == 1 or kind == "memory" or not isinstance(kind, str):
        return make_buffer(kind, capacity, path)
    return SharedBuffer(lambda: make_buffer(kind, capacity, path), capacity)


class SharedBuffer:
    """Every rank calls every method; the buffer that `make` gives on rank 0, at the first of them, does it."""

    def __init__(self, make: Callable[[], Buffer], capacity: int) -> None:
        self._make, self.capacity = make, capacity
        self._buffer: Buffer | None = None

    @property
    def room(self) -> int:
        return int(self._call("room", lambda: self._here().room))

    def __len__(self) -> int:
        return int(self._call("len", lambda: len(self._here())))

    def add(self, batch: Batch) -> None:
        self._call("add", lambda: self._here().add(batch))

    def drain(self, count: int | None = None) -> Batch:
        return self._call("drain", lambda: self._here().drain(count))  # type: ignore[no-any-return]

    def state(self) -> Batch:
        return self._call("state", lambda: self._here().state())  # type: ignore[no-any-return]

    def load_state(self, batch: Batch) -> None:
        self._call("load_state", lambda: self._here().load_state(batch))

    def _here(self) -> Buffer:
        if self._buffer is None:
            self._buffer = self._make()
        return self._buffer

    def _call(self, verb: str, work: Callable[[], Any]) -> Any:
        return on_main(f"buffer {verb}", work)
