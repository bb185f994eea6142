"""Reward functions that are computed in this process and end it (`os._exit`, a crash): a small shell process names them
on stderr, as this one cannot any more. One that holds the interpreter longer than it may ends this process, too: no
thread of Python's could, so a timer of `faulthandler` does."""

from __future__ import annotations

import atexit
import faulthandler
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_SCRIPT = """
while read -r line; do last=$line; done
[ -z "$last" ] || echo "verl: process $0 ended while it computed reward $last: the function ended it (os._exit, a\
 crash, too much memory, holding the interpreter beyond its timeout), or it was killed. Leave out process=False, so\
 that only a process of its own ends, and is replaced" >&2
"""


#: Seconds after its deadline at which a call that holds the interpreter ends this process.
_LONGER = 8.0
#: Of each call that is under way: the name of its reward, and its deadline.
_calls: dict[object, tuple[str, float]] = {}
#: Where the shell process reads the names, until this process ends. None: it has not begun; -1: it is over.
_pipe: int | None = None
_lock = threading.Lock()


@contextmanager
def computing(name: str, timeout: float) -> Iterator[None]:
    """If this process ends inside the block, a message on its stderr names reward `name` as the cause; and it ends if
    nothing else runs in it `timeout` and `_LONGER` seconds after the block began."""
    call = object()
    with _lock:
        _calls[call] = " ".join(name.split()), time.monotonic() + timeout
        _record()
    try:
        yield
    finally:
        with _lock:
            _calls.pop(call, None)
            _record()


def _record() -> None:
    """Tell the shell process what is under way, and have the earliest deadline end this process, unless Python runs by
    then and records anew."""
    global _pipe
    if _pipe is None:
        read, _pipe = os.pipe()
        command = ["sh", "-c", _SCRIPT, str(os.getpid())]
        subprocess.Popen(command, stdin=read, stdout=subprocess.DEVNULL, start_new_session=True)
        os.close(read)
    with suppress(OSError):  # the shell process has ended
        os.write(_pipe, f"{', '.join(dict.fromkeys(name for name, _ in _calls.values()))}\n".encode())
    deadline = min((deadline for _, deadline in _calls.values()), default=math.inf)
    if deadline < math.inf and sys.__stderr__ is not None:
        left = max(0.0, deadline - time.monotonic())
        faulthandler.dump_traceback_later(left + _LONGER, exit=True, file=sys.__stderr__)
    else:
        faulthandler.cancel_dump_traceback_later()


@atexit.register
def _end() -> None:
    """This process ends as it should: so does the shell process, without a word."""
    global _pipe
    with _lock:
        if _pipe is not None:
            _calls.clear()
            _record()
            os.close(_pipe)
            _pipe = -1


def _forget() -> None:
    """In a fork of this process, which records its own calls."""
    global _calls, _lock, _pipe
    if _pipe is not None and _pipe != -1:
        os.close(_pipe)
    _calls, _lock, _pipe = {}, threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
