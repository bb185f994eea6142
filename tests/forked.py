"""Python processes forked from one that has imported the libraries: real processes, with pids, pipes, signals and exit
statuses of their own, but without the seconds of imports that each would begin with.

What a cold start itself does (imports, environment variables that libraries read when they are imported) is tested with
`subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

from tests import setup_worker
from tests.setup_worker import ADDRESS, exit_code, fork

#: The parent of all of them. It has no thread.
_SERVE = "import sys; sys.path[:] = {!r}; from tests import forked; forked.serve({!r})"
_server: subprocess.Popen[bytes] | None = None


def start(tests: Sequence[str] = ()) -> None:
    """Start their parent, unless a process that started this one has done so. It imports the libraries meanwhile.

    Args:
        tests: arguments of pytest: the modules of these tests are imported, too, once for all who run them.
    """
    global _server
    if ADDRESS in os.environ:
        return
    os.environ[ADDRESS] = str(Path(tempfile.mkdtemp(prefix="forked-", dir="/tmp"), "socket"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    command = [sys.executable, "-c", _SERVE.format(sys.path, list(tests))]
    _server = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    atexit.register(stop)


def stop() -> None:
    """End their parent, if this process started it."""
    global _server
    if _server is not None:
        _server.kill()
        _server.wait()
        _server = None
        path = Path(os.environ.pop(ADDRESS))
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def warm_ray() -> None:
    """From now on, clusters that this process starts through this package have their workers forked."""
    from verl._host import ray_session

    import_ray = ray_session.import_ray

    @wraps(import_ray)
    def warm() -> Any:
        ray = import_ray()
        from ray._private import ray_constants

        if not ray.is_initialized():
            start()
            ray_constants.SETUP_WORKER_FILENAME = setup_worker.__file__
        return ray

    ray_session.import_ray = warm


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
        streams = [number if end == -1 else end for number, end in enumerate(ends)]
        start()
        if env is None:
            # Set where this process has used Ray. Ray reads it when it is imported, which their parent has done before.
            env = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
        environment = {ADDRESS: os.environ[ADDRESS], **env}
        self._end, self.pid = fork(line, environment, streams, str(cwd or os.getcwd()), new_session=start_new_session)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """What `os.waitpid` would say: the server, whose child it is, tells the exit status."""
        if not select.select([self._end], [], [], 0 if wait_flags & os.WNOHANG else None)[0]:
            return 0, 0
        code = exit_code(self._end)
        self._end.close()
        return self.pid, -code if code < 0 else code << 8

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


def serve(tests: Sequence[str]) -> NoReturn:
    """Fork the processes that are asked for, until the process that started this one is gone."""
    with contextlib.suppress(ImportError):  # an environment that lacks a library has the others
        from tests import preloaded

        preloaded.load(tests)

    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ends: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.environ[ADDRESS])
        listener.listen(64)
        while True:
            ready = select.select([0, woken, listener], [], [])[0]
            if 0 in ready:
                os._exit(0)
            if woken in ready:
                woken.recv(4096)
            while ends and (child := os.waitpid(-1, os.WNOHANG))[0]:
                with ends.pop(child[0]) as end, contextlib.suppress(OSError):  # nobody may wait for it
                    end.send(os.waitstatus_to_exitcode(child[1]).to_bytes(4, "big", signed=True))
            if listener in ready:
                order, _ = listener.accept()
                if (pid := os.fork()) == 0:
                    for end in (listener, woken, wake, *ends.values()):
                        end.close()
                    _obey(order)
                ends[pid] = order


def _obey(order: socket.socket) -> NoReturn:
    """In the forked process: `_become` what is ordered."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _, streams, _, _ = socket.recv_fds(order, 1, 3)
        with order, order.makefile("rb") as text:
            told = json.load(text)
            order.send(os.getpid().to_bytes(4, "big"))
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        _become(**told)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _become(line: list[str], environment: dict[str, str], folder: str, new_session: bool) -> NoReturn:
    """What the interpreter does with a command, to its end."""
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
    if kind == "-W":
        warnings.simplefilter(rest[0])  # type: ignore[arg-type]
        _execute(rest[1:])
    elif kind == "-m":
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
