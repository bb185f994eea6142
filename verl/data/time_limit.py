"""A bound on the time of other people's Python code that runs in this thread, such as a chat template's."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_TICK = 0.25
#: Of each thread that runs such code, until when it may.
_running: dict[int, float] = {}
_watcher: threading.Thread | None = None


class _LateError(Exception):
    pass


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends what is inside after so many seconds. A single call of C code, which no exception reaches, ends first. Not
    for code that enters it again.

    Raises:
        TimeoutError: it was late.
    """
    global _watcher
    if _watcher is None or not _watcher.is_alive():  # a forked process has none
        _watcher = threading.Thread(target=_watch, name="verl-time-limit", daemon=True)
        _watcher.start()
    thread = threading.get_ident()
    _running[thread] = time.monotonic() + seconds
    try:
        yield
        _leave(thread)
    except _LateError:
        raise TimeoutError(f"it takes more than {seconds:g} s") from None
    except BaseException:
        _leave(thread)
        raise


def _leave(thread: int) -> None:
    if _running.pop(thread, None) is None:
        for _ in range(100):  # the exception is on its way to here, and must not arrive later
            time.sleep(0.01)


def _watch() -> None:
    while True:
        time.sleep(_TICK)
        for thread, until in list(_running.items()):
            if until < time.monotonic() and _running.pop(thread, None) is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_LateError))
