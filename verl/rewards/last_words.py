"""An error message for a reward function that ends this process (`os._exit`, a crash): a small shell process prints it,
as this one cannot any more."""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_SCRIPT = """
while read -r line; do last=$line; done
[ -z "$last" ] || echo "verl: process $0 ended while it computed reward $last: the function ended it (os._exit, a\
 crash, too much memory), or it was killed. Give the Reward workers=1, so that only a worker ends, and is replaced" >&2
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


_witnesses: dict[int, _Witness] = {}
_lock = threading.Lock()


@contextmanager
def computing(name: str) -> Iterator[None]:
    """If this process ends inside the block, a message on its stderr names reward `name` as the cause."""
    with _lock:
        if (pid := os.getpid()) not in _witnesses:
            _witnesses[pid] = _Witness()
        witness = _witnesses[pid]
    witness.change(name, 1)
    try:
        yield
    finally:
        witness.change(name, -1)
