"""Ctrl-C and SIGTERM: the first asks for a checkpoint and an orderly end, the second ends the process at once."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from verl._host import ranks
from verl._host import ray_session as cluster

logger = logging.getLogger(__name__)


class StopSignal:
    """Watches for signals while it is entered.

    >>> with StopSignal() as stop:
    ...     while not stop.received:
    ...         step()
    ...     save()

    Only the main thread can receive signals; entered elsewhere it watches nothing.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    #: The signal that asked for the end, if one has.
    received: signal.Signals | None = None

    def __enter__(self) -> StopSignal:
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
            ranks.on_signal = self._forwarded
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        ranks.on_signal = None

    def _forwarded(self, number: int) -> None:
        """Another rank was sent a signal, which this one may have been sent too."""
        self.received = self.received or signal.Signals(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            kill_children()
            cluster.remove_sessions()
            os._exit(128 + number)
        self.received = signal.Signals(number)
        # The log's lock may be held by the very code that the signal interrupts; `write` takes none.
        text = f"\n{self.received.name}: finishing this step and saving a checkpoint; once more to end at once\n"
        os.write(2, text.encode())


def kill_children() -> None:
    """SIGKILL to all processes that descend from this one (without /proc: to children of `multiprocessing`)."""
    for child in multiprocessing.active_children():
        child.kill()
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry.parent.name)] = int(fields[1])
    for pid in parents:
        ancestor = parents.get(pid)
        while ancestor and ancestor != os.getpid():
            ancestor = parents.get(ancestor)
        if ancestor:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError as error:
                logger.debug("process %d cannot be ended: %s", pid, error)
