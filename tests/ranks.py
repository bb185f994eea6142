"""Jobs of several ranks: `torchrun` starts them as a user does, `job` forks them from a process that has the libraries.

Ten seconds of imports a rank are most of what a job under torchrun costs, so only tests of torchrun itself pay them.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

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

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.preloaded"])


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
    line = [str(arg) for arg in args]
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, name)) for name in ("stdout", "stderr")]
        for file in files:
            Path(file).touch()
        processes = [_SERVER.Process(target=_run, args=(line, env, files, os.getcwd())) for env in environments]
        try:
            for process in processes:
                process.start()
            _wait(processes)
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        out, err = (Path(file).read_text() for file in files)
    failed = [code for code in codes if code != 0]
    done = subprocess.CompletedProcess(line, 1 if failed else 0, out, err)
    if check:
        assert not failed, f"exit codes {codes} (None: killed after {DEADLINE:g} s)\n{err[-4000:]}"
    return done


def _wait(processes: list[BaseProcess]) -> None:
    """Until all have ended, or the time is up: that of the job, or the shorter one after a failure."""
    end = time.monotonic() + DEADLINE
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        if any(process.exitcode for process in processes):
            end = min(end, time.monotonic() + AFTER_A_FAILURE)
            for process in processes:
                process.join(max(end - time.monotonic(), 0))
        time.sleep(0.02)


def _run(line: list[str], environment: Mapping[str, str], files: list[str], folder: str) -> None:
    """One rank, in a process of its own."""
    for number, file in enumerate(files, start=1):
        # Ranks write to one file, each line at its end.
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    os.chdir(folder)
    os.environ |= environment
    code: object = 0
    try:
        if line[0] == "-m":
            sys.argv = line[1:]
            runpy.run_module(line[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = line
            sys.path.insert(0, str(Path(line[0]).parent.resolve()))
            runpy.run_path(line[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
