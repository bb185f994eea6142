"""Jobs of several ranks: `torchrun` starts them as a user does, `job` forks them from a process that has the libraries.

Ten seconds of imports a rank are most of what a job under torchrun costs, so only tests of torchrun itself pay them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import forked

ENV = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
#: Seconds until a job is killed.
DEADLINE = 280.0
#: Seconds that the other ranks of a job have to end by themselves once one of them failed, as under torchrun.
AFTER_A_FAILURE = 30.0


def command(ranks: int, *args: str | Path) -> list[str]:
    """The torchrun line of a script (or "-m", MODULE) and its arguments."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*torchrun, *map(str, args)]


def torchrun(ranks: int, *args: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(ranks, *args), env=ENV, capture_output=True, text=True, timeout=DEADLINE)
    if check:
        assert done.returncode == 0, done.stderr[-4000:]
    return done


def job(ranks: int, *args: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A script (or "-m", MODULE) and its arguments on `ranks` ranks, with the environment that torchrun gives them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    size = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return _forked(
        [{**meeting, **size, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)], args, check
    )


def alone(*args: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """The same in one process."""
    return _forked([{}], args, check)


def _forked(
    environments: list[dict[str, str]], args: tuple[str | Path, ...], check: bool
) -> subprocess.CompletedProcess[str]:
    """A process for each environment; whatever happens, none of them is left."""
    line = [sys.executable, *map(str, args)]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        paths = [Path(folder, name) for name in ("stdout", "stderr")]
        # Ranks write to one file, each line at its end.
        out, err = (stack.enter_context(path.open("a")) for path in paths)
        processes: list[forked.Popen] = []
        try:
            for env in environments:
                processes.append(forked.Popen(line, stdout=out, stderr=err, env={**ENV, **env}))
            _wait(processes)
            codes = [process.returncode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [path.read_text() for path in paths]
    failed = [code for code in codes if code != 0]
    done = subprocess.CompletedProcess(line, 1 if failed else 0, *texts)
    if check:
        assert not failed, f"exit codes {codes} (None: killed after {DEADLINE:g} s)\n{texts[1][-4000:]}"
    return done


def _wait(processes: list[forked.Popen]) -> None:
    """Until all have ended, or the time is up: that of the job, or the shorter one after a failure."""
    end = time.monotonic() + DEADLINE
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        if any(process.returncode for process in processes):
            end = min(end, time.monotonic() + AFTER_A_FAILURE)
        time.sleep(0.02)
