"""Python processes forked from one that has imported the libraries: real processes, with pids, pipes, signals and exit
statuses of their own, but without the seconds of imports that each would begin with.

What a cold start itself does (imports, environment variables that libraries read when they are imported) is tested with
`subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

#: The parent of all of them, started with the first. It has no thread.
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.preloaded"])


class Popen(subprocess.Popen):
    """`subprocess.Popen` of `[sys.executable, "-c" CODE | "-m" MODULE | SCRIPT, *arguments]`: where that would execute
    the interpreter, this forks."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
        start_new_session, process_group=-1,
    ) -> None:  # fmt: skip
        python, *line = map(str, args)
        if python != sys.executable or preexec_fn or pass_fds or shell or process_group != -1:
            raise ValueError(f"only a plain command of {sys.executable} can be forked, not {python}")
        ends = (p2cread, c2pwrite, errwrite)
        streams = [DupFd(number if end == -1 else end) for number, end in enumerate(ends)]
        environment = dict(os.environ if env is None else env)
        self._process = _SERVER.Process(
            target=_run, args=(line, environment, streams, str(cwd or os.getcwd()), start_new_session)
        )
        self._process.start()
        self.pid = self._process.pid
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """What `os.waitpid` would say: the server, whose child it is, tells the exit status."""
        if not wait_flags & os.WNOHANG:
            self._process.join()
        code = self._process.exitcode
        return (0, 0) if code is None else (self.pid, -code if code < 0 else code << 8)

    def _internal_poll(self, _deadstate: Any = None, **_: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run(
    command: Sequence[str | Path],
    *,
    input: str | None = None,
    timeout: float = 120.0,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run(..., text=True)` of such a command; both streams are captured unless `options` say otherwise."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(list(command), process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _run(
    line: list[str], environment: Mapping[str, str], streams: Sequence[Any], folder: str, new_session: bool
) -> None:
    """In the forked process: what the interpreter does with the command, to its end."""
    for number, stream in enumerate(streams):
        end = stream.detach()
        os.dup2(end, number)
        os.close(end)
    by_line = "PYTHONUNBUFFERED" in environment
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), line_buffering=by_line)  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), "utf-8", "backslashreplace", line_buffering=True)  # noqa: SIM115
    if new_session:
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    code: object = 0
    try:
        _execute(line)
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        code = 120
    os._exit(code if isinstance(code, int) else int(code is not None))


def _execute(line: list[str]) -> None:
    kind, *rest = line
    if kind == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = line
        sys.path.insert(0, str(Path(kind).parent.resolve()))
        runpy.run_path(kind, run_name="__main__")
