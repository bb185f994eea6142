"""Reward functions that can cause trouble, in a module that is quickly imported."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def length(texts: list[str]) -> list[float]:
    """Of one sample at a time; a text may ask for trouble."""
    (text,) = texts
    if text.startswith("wait"):
        time.sleep(float(text.removeprefix("wait")))
    elif text == "raise":
        raise ValueError("no")
    elif text == "hang":
        time.sleep(600)
    elif text == "die":
        os._exit(3)
    elif text.startswith("/"):  # a file: only the first that reads it has trouble
        with suppress(FileNotFoundError):
            trouble = Path(text).read_text()
            os.unlink(text)
            return length([trouble])
    return [float(len(text))]


def who(texts: list[str]) -> list[float]:
    time.sleep(float(texts[0].removeprefix("wait")))
    return [float(os.getpid())]


def pids(group: Any) -> list[int]:
    """The process ids of the workers of a pool that have started."""
    return [worker.pid for worker in group.workers if worker.pid]
