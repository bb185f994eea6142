"""What every buffer is: a queue of samples between rollout and training; see `buffers`."""

from __future__ import annotations

from typing import Annotated, Protocol, runtime_checkable

from pydantic import Field

from verl.batch import Batch
from verl.errors import DataError

#: Most samples that a buffer holds.
Capacity = Annotated[int, Field(ge=1, le=2**62)]


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
