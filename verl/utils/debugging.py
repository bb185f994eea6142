"""Finding out what goes wrong in a run of many processes."""

from __future__ import annotations

import faulthandler
import hashlib
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.batch import Batch
from verl.errors import ClusterError
from verl.training.ranks import gather_json


def dump_stacks_on_signal(path: str | Path, number: int = signal.SIGUSR1) -> None:
    """From now on `kill -USR1 PID` appends the stacks of all threads of this process to a file, even while it hangs
    in a collective or in other native code."""
    file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - it stays open as long as the process lives
    faulthandler.register(number, file=file, all_threads=True)


def check_same(name: str, value: torch.Tensor | Batch | str | bytes, group: Any = None) -> None:
    """Compare a value across the ranks of a process group, bit for bit; all of them must call this. A process alone
    has nobody to differ from.

    Raises:
        ClusterError: they differ; names the ranks that hold each of the values.
    """
    if not dist.is_initialized():
        return
    local_digest = _digest(value)
    digests = gather_json(local_digest, group or dist.group.WORLD)
    if len(set(digests)) > 1:
        sides = [[rank for rank, other in enumerate(digests) if other == digest] for digest in dict.fromkeys(digests)]
        raise ClusterError(f"'{name}' is not the same on all ranks: {' / '.join(f'ranks {side}' for side in sides)}")


def _digest(value: torch.Tensor | Batch | str | bytes) -> str:
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        # Equal bytes of another dtype or shape are another value.
        head = f"{data.dtype}{tuple(data.shape)}".encode()
        content = head + data.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Batch):
        content = value.to_ipc()
    else:
        content = value.encode() if isinstance(value, str) else value
    return hashlib.sha256(content).hexdigest()
