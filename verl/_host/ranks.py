"""The ranks of a torchrun job, and the objects that each of them makes before the first call.

Under torchrun every rank runs the script up to its first call. What handles were given until then (models, tokenizers,
optimizers, algorithms) is registered on each rank in the same order, so that it can be named by its number later.
"""

from __future__ import annotations

import io
import logging
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from verl.errors import ConfigError

logger = logging.getLogger(__name__)


def _number(name: str, outside: int) -> int:
    """What torchrun tells the ranks of a job; `outside` of a job of several."""
    is_job = "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
    text = os.environ.get(name, str(outside)) if is_job else str(outside)
    if not text.isdecimal():
        raise ConfigError(f"the environment has {name}='{text}', which is no number: start with torchrun, or unset it")
    return int(text)


#: Ranks of the torchrun job that this process belongs to; 1 outside of one.
torchrun_ranks = partial(_number, "WORLD_SIZE", 1)
#: The rank of this process in its job; 0 outside of one. Rank 0 alone runs the script after the first call.
rank_here = partial(_number, "RANK", 0)
#: Ranks of the job on this machine, which share its memory.
local_ranks = partial(_number, "LOCAL_WORLD_SIZE", 1)


def who() -> str:
    """This process among the ranks of its job, for messages."""
    return f"rank {rank_here()} of {torchrun_ranks()}, host {socket.gethostname()}"


class Registry:
    """Objects by the order in which they were registered. It keeps them alive, so that an `id` names one object."""

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        #: Set at the first call: later objects are the driver's alone.
        self.is_closed = False

    def add(self, handle: str, **objects: Any) -> None:
        """Register what a handle was given; what is None, or known already, is left out."""
        if torchrun_ranks() == 1 or self.is_closed:
            return
        if not self.objects and rank_here() > 0:
            sys.stdout = _ToLog()
        for name, value in objects.items():
            if value is not None and id(value) not in self.numbers:
                self.numbers[id(value)] = len(self.objects)
                self.objects.append(value)
                self.labels.append(f"{handle}.{name} ({type(value).__qualname__})")


class _ToLog(io.TextIOBase):
    """The standard output of a rank that is not the driver: its lines go to the log of that rank."""

    _line = ""
    _is_writing = False

    def write(self, text: str) -> int:
        if not self._is_writing:  # a log handler may itself write here
            self._is_writing = True
            try:
                *lines, self._line = (self._line + text).split("\n")
                for line in filter(None, lines):
                    logger.info("%s", line)
            finally:
                self._is_writing = False
        return len(text)


registry = Registry()

#: On the driver: what a signal means that another rank was sent; None: what it means to this process.
on_signal: Callable[[int], None] | None = None
