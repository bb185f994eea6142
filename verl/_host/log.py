"""Where the package's log messages go."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from verl._base.durable import LineFile
from verl._base.names import check_known
from verl._base.visible import visible
from verl._host.ranks import rank_here, torchrun_ranks, who
from verl._host.user_code import DETAIL

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def setup_logging(log_file: str | Path | None = None) -> None:
    """Send the package's log messages to standard error and, all of them, to a file. `LOG_LEVEL` sets what standard
    error shows (INFO); the file gets that too, and at least INFO. Ranks after the first show only errors, with their
    rank.

    Raises:
        ConfigError: `LOG_LEVEL` is no level.
    """
    level = os.environ.get("LOG_LEVEL", "INFO").upper()
    check_known("LOG_LEVEL is", [level], _LEVELS)
    root = logging.getLogger("verl")
    for handler in [h for h in root.handlers if getattr(h, "of_verl", False)]:
        root.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    handlers[0].setLevel("ERROR" if rank_here() > 0 else level)
    if log_file is not None:
        Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        handlers.append(_LogFile(Path(log_file)))
        if level != "DEBUG":
            handlers[0].addFilter(lambda record: not hasattr(record, DETAIL))
    rank = f"{who()} " if torchrun_ranks() > 1 else ""
    for handler in handlers:
        handler.of_verl = True  # type: ignore[attr-defined]
        handler.setFormatter(_Lines(f"%(asctime)s {rank}%(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
    root.setLevel(min(logging.INFO, logging.getLevelName(level)))
    root.propagate = False


def follow_log_level() -> None:
    """For a script: what `LOG_LEVEL` names is shown, on standard error, or by the script's own handlers if it has some.
    Levels that are not ours are meant for others."""
    level, root = os.environ.get("LOG_LEVEL", "").upper(), logging.getLogger("verl")
    if level not in _LEVELS or any(getattr(handler, "of_verl", False) for handler in root.handlers):
        return
    if root.hasHandlers():
        root.setLevel(level)
    else:
        setup_logging()


class _Lines(logging.Formatter):
    """One message begins one line, whatever text is in it."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), "    ")


class _LogFile(logging.Handler):
    """Log messages to a file; while the disk is full they wait."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._lines: LineFile[str] = LineFile(path)
        self._lines.append()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(self.format(record) + "\n")
        except Exception:  # a message that its arguments do not fit
            self.handleError(record)
