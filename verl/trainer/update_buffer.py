"""Samples on their way from rollout to update, in the buffer that they wait in."""

from __future__ import annotations

from collections.abc import Mapping

from verl.batch import Batch
from verl.data.buffers import MemoryBuffer, make_buffer
from verl.errors import ConfigError
from verl.report.samples import renamed, sample_names
from verl.trainer.options import BufferOptions

_UNBOUNDED = 2**62


class UpdateBuffer:
    """Gives out what has been collected each time that an update is due.

    Raises:
        ConfigError: an `update_freq` that the buffer never holds.
    """

    def __init__(self, options: BufferOptions) -> None:
        size, update_freq = options.buffer_size, options.update_freq
        self.buffer = make_buffer(options.buffer, _UNBOUNDED if size is None else size, options.buffer_dir)
        self.update_freq = update_freq
        if (update_freq or 1) > self.buffer.capacity:
            raise ConfigError(
                f"update_freq is the number of new samples that an update waits for, at most what the buffer holds "
                f"({self.buffer.capacity}), not {update_freq}"
            )
        #: Names of samples that have waited since before the first step, which calls its own alike.
        self._former: set[str] | None = None

    def add(self, samples: Mapping[str, Batch]) -> Mapping[str, Batch] | None:
        """Put the samples of each task in; what the update takes that is due now, or None. Those of several tasks never
        wait."""
        if self.update_freq is None and isinstance(self.buffer, MemoryBuffer) and not len(self.buffer):
            return samples  # none wait, and these do not have to
        if self._former is None:
            self._former = sample_names(self.buffer.state())
        ((task, rows),) = samples.items()
        rows = renamed(rows, self._former)
        wanted = self.update_freq or 1
        # What an update takes at once needs no room to wait in.
        overflow = len(rows) > self.buffer.room and len(self.buffer) + len(rows) >= wanted
        if not overflow:
            self.buffer.add(rows)
            if len(self.buffer) < wanted:
                return None
        waiting, self._former = self.buffer.drain(), set()
        return {task: Batch.concat([waiting, rows]) if overflow else waiting}
