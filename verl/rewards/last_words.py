"""Reward functions that are computed in this process and end it (`os._exit`, a crash): a small shell process names them
on stderr, as this one cannot any more. One that holds the interpreter longer than it may ends this process, too: no
thread of Python's could, so a timer of `faulthandler` does."""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import math
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_SCRIPT = """
while read -r line; do last=$line; done
[ -z "$last" ] || echo "verl: process $0 ended while it computed reward $last: the function ended it (os._exit, a\
 crash, too much memory, holding the interpreter beyond its timeout), or it was killed. Leave out process=False, so\
 that only a process of its own ends, and is replaced" >&2
"""


class _Witness:
    """The shell process: it reads the names of running rewards from a pipe, which closes when this process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        read, self._write = os.pipe()
        command = ["sh", "-c", _SCRIPT, str(os.getpid())]
        subprocess.Popen(command, stdin=read, stdout=subprocess.DEVNULL, start_new_session=True)
        os.close(read)
        atexit.register(self._close)
        os.register_at_fork(after_in_child=self._close_pipe)

    def change(self, name: str, by: int) -> None:
        with self._lock:
            self._running[" ".join(name.split())] += by
            self._report([name for name, calls in self._running.items() if calls > 0])

    def _close(self) -> None:
        """This process ends as it should: so does the shell, without a word."""
        with self._lock:
            self._report([])
            self._close_pipe()

    def _close_pipe(self) -> None:
        write, self._write = self._write, -1
        if write != -1:
            os.close(write)

    def _report(self, names: list[str]) -> None:
        with suppress(OSError):  # the shell process was ended
            os.write(self._write, f"{', '.join(names)}\n".encode())


#: Seconds after its deadline at which a call that holds the interpreter ends this process.
_LONGER = 8.0
_witnesses: dict[int, _Witness] = {}
_deadlines: dict[int, float] = {}
_numbers = itertools.count()
_lock = threading.Lock()


@contextmanager
def computing(name: str, timeout: float) -> Iterator[None]:
    """If this process ends inside the block, a message on its stderr names reward `name` as the cause; and it ends if
    nothing else runs in it `timeout` and `_LONGER` seconds after the block began."""
    with _lock:
        if (pid := os.getpid()) not in _witnesses:
            _witnesses[pid] = _Witness()
            _deadlines.clear()
        witness, number = _witnesses[pid], next(_numbers)
    witness.change(name, 1)
    _set_timer(number, time.monotonic() + timeout)
    try:
        yield
    finally:
        _set_timer(number, math.inf)
        witness.change(name, -1)


def _set_timer(number: int, deadline: float) -> None:
    """Have the earliest deadline end this process, unless Python runs by then and changes it."""
    with _lock:
        _deadlines.pop(number, None)
        if deadline < math.inf:
            _deadlines[number] = deadline
        if _deadlines and sys.__stderr__ is not None:
            left = max(0.0, min(_deadlines.values()) - time.monotonic())
            faulthandler.dump_traceback_later(left + _LONGER, exit=True, file=sys.__stderr__)
        else:
            faulthandler.cancel_dump_traceback_later()
