"""Jobs of several ranks, started as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ENV = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


def command(ranks: int, *args: str | Path) -> list[str]:
    """The torchrun line of a script (or "-m", MODULE) and its arguments."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*torchrun, *map(str, args)]


def torchrun(ranks: int, *args: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(ranks, *args), env=ENV, capture_output=True, text=True, timeout=280)
    if check:
        assert done.returncode == 0, done.stderr[-4000:]
    return done


def alone(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """The same in one process."""
    done = subprocess.run([sys.executable, *map(str, args)], env=ENV, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return done
