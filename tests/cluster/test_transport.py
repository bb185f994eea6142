"""What `run` does with the events of a transport."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import verl
from verl.cluster import transport
from verl.cluster.transport import Command, Event, Transport, run
from verl.errors import BrokenCollectiveError


class Stuck(Transport):
    """Two ranks: the other one fails at once, and this one's part returns only when the job is closed."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.closed = threading.Event()
        self.worker.run = self.meet  # type: ignore[method-assign, assignment]
        self.events = [Event(1, "error", ZeroDivisionError("on rank 1"))]

    def meet(self) -> Iterator[Any]:
        assert self.closed.wait(30), "this rank was left in the collective"
        raise BrokenCollectiveError("in vain")
        yield

    def receive(self, sent: None, seconds: float) -> list[Event]:
        events, self.events = self.events, []
        return events

    def close(self, reason: str = "") -> None:
        self.ended = reason
        self.closed.set()


def test_a_rank_that_waits_for_one_that_failed_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "GRACE", 0.1)
    job = Stuck()
    with pytest.raises(ZeroDivisionError, match="on rank 1"):
        list(run(job, dict.fromkeys((0, 1), Command("run")), "meet"))
    assert job.ended == transport.STUCK


def test_who_stops_listening_ends_a_stream_of_one_process() -> None:
    job, seen = Transport("cpu"), list[int]()

    def numbers() -> Iterator[int]:
        for number in range(9):
            seen.append(number)
            yield number

    job.worker.run = numbers  # type: ignore[method-assign, assignment]
    stream = run(job, {0: Command("run")}, "numbers")
    assert next(stream) == (0, 0)
    stream.close()
    assert seen == [0]


def test_a_worker_of_one_process_is_freed_with_its_handle(tiny: Path) -> None:
    """At once, without the garbage collector: its weights are most of the memory."""
    actor, other = verl.Actor(str(tiny)), verl.Actor(str(tiny))
    workers = [weakref.ref(handle.group.worker) for handle in (actor, other)]
    gc.collect()
    gc.disable()
    try:
        del actor
        assert workers[0]() is None and workers[1]() is not None
    finally:
        gc.enable()
    assert other.generate_sequences(["a"])
