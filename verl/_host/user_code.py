"""Errors of the user's own code as messages: what was raised and where, and the whole traceback once."""

from __future__ import annotations

import logging
import os
import re
import sys
import sysconfig
import threading
import traceback
from pathlib import Path

from verl._base.secrets import masked
from verl.errors import VerlError

#: Folders of code that is not the user's: this package, Python and what is installed.
NOT_THE_USERS = tuple(
    f"{Path(folder).resolve()}{os.sep}"
    for folder in (str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
)
#: Characters of an error in a message, of which its own text has some at least, and of a traceback.
_MESSAGE, _TEXT, _TRACEBACK = 280, 100, 10_000
#: Places whose traceback is shown, at most.
_MOST = 100
#: Marks a log record that people need only when they look for it: a run's goes to its log file alone.
DETAIL = "is_detail"
_shown: set[tuple[str, ...]] = set()
_lock = threading.Lock()


def describe(error: BaseException) -> str:
    """The type and text of an error, and the innermost line of the user's own files; never raises."""
    where_raised = _innermost_line(traceback.extract_tb(error.__traceback__))
    name, where = type(error).__name__, f" ({where_raised})" if where_raised else ""
    try:
        text = masked(str(error))[: max(_TEXT, _MESSAGE - len(name) - len(where))]
    except Exception:  # the text of an exception may raise
        text = ""
    return f"{name}{f': {text}' if text else ''}{where}"


def traceback_of(error: BaseException) -> str | None:
    """The traceback of an error as text; None for the package's own errors, whose message says all."""
    if isinstance(error, VerlError):
        return None
    return "".join(traceback.format_exception(error))[-_TRACEBACK:]


def show_once(logger: logging.Logger, what: str, text: str | None) -> None:
    """Log a traceback (`traceback_of`), unless this process has logged one of the same lines of code."""
    if text is None:
        return
    lines = (what, *re.findall(r'^ *File ".*', text, re.MULTILINE))
    with _lock:
        if lines in _shown or len(_shown) >= _MOST:
            return
        _shown.add(lines)
    logger.warning("%s: the traceback, shown once:\n%s", what, text.rstrip(), extra={DETAIL: True})


def line_of(thread: int) -> str | None:
    """The innermost line of the user's own files at which a thread is."""
    frame = sys._current_frames().get(thread)
    return None if frame is None else _innermost_line(traceback.extract_stack(frame))


def _innermost_line(stack: traceback.StackSummary) -> str | None:
    """The innermost line that is neither this package's nor an installed library's."""
    for frame in reversed(stack):
        if not frame.filename.startswith(("<frozen", *NOT_THE_USERS)):
            return f"{frame.filename} line {frame.lineno}, in {frame.name}"
    return None
