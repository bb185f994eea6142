"""Where communication time goes: seconds of each collective on this rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass
class CollectiveTime:
    """Cost of a collective on this rank.

    seconds: from its start to its end; waiting for slower ranks is part of it.
    elements: of its inputs, where the backend tells their shapes.
    """

    calls: int = 0
    seconds: float = 0.0
    elements: int = 0


@contextmanager
def collective_times() -> Iterator[dict[str, CollectiveTime]]:
    """Time every collective that is run in the block (FSDP's own ones too); the dictionary, such as
    `{"gloo:all_reduce": ...}`, is filled when the block ends. Costs what torch's profiler costs: for debugging."""
    times: dict[str, CollectiveTime] = {}
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        yield times
    for event in profiler.events() or ():
        if event.name.startswith(("gloo:", "nccl:", "mpi:", "ucc:")):
            entry = times.setdefault(event.name, CollectiveTime())
            entry.calls += 1
            entry.seconds += event.time_range.elapsed_us() / 1e6
            entry.elements += sum(math.prod(shape) for shape in event.input_shapes or () if shape)
