"""The ranks of a torchrun job, told by its environment."""

from __future__ import annotations

import os
import socket


def torchrun_ranks() -> int:
    """Ranks of the torchrun job that this process belongs to; 1 outside of one."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def rank_here() -> int:
    """The rank of this process in its torchrun job; 0 outside of one."""
    return int(os.environ.get("RANK", "0"))


def local_ranks() -> int:
    """Ranks of the job on this machine, which share its memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if torchrun_ranks() > 1 else 1


def is_main() -> bool:
    """Whether side effects happen in this process: on rank 0 of a torchrun job."""
    return rank_here() == 0


def who() -> str:
    """This process among the ranks of its job, for messages."""
    return f"rank {rank_here()} of {torchrun_ranks()}, host {socket.gethostname()}"
