"""Untrusted programs in a sandbox of Linux user namespaces, seccomp and resource limits.

A program sees Python's standard library and the system's shared libraries, read-only, a small file system in memory,
and nothing else: no network, no file, process, environment variable or user of the host. The number of its processes,
the memory of each, its time, files and output are bounded, and all that it started ends with it. If the kernel or its
settings do not allow one of these means, nothing runs: `SandboxError`.

Not covered: bugs of the kernel itself. Memory is bounded per process, so `processes * memory` is the whole bound.
"""

from __future__ import annotations

import functools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import Field

from verl._base.checked import checked
from verl._base.record import Positive
from verl.errors import ConfigError, SandboxError

_JAIL = Path(__file__).with_name("jail.py")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
#: Seconds for a program's processes to start and to be ended.
_GRACE = 20.0

Status = Literal["ok", "error", "time", "output"]
Bound = Annotated[int, Field(gt=0)]


@checked
@dataclass(frozen=True, slots=True)
class Limits:
    """Resources that a program may use.

    Attributes:
        seconds: of wall-clock time, and of CPU time of each process.
        memory: bytes of address space of each process.
        processes: processes and threads at a time.
        output: bytes of stdout and stderr together.
        disk: bytes of files, which are in memory.

    Raises:
        ConfigError: one of them is not positive.
    """

    seconds: Positive = 10.0
    memory: Bound = 512 << 20
    processes: Bound = 8
    output: Bound = 64 << 10
    disk: Bound = 16 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """How a program ended.

    Attributes:
        status: "ok" (exit code 0), "error", or "time" or "output" if it was stopped at that limit.
        exit_code: negative for a signal, None if the program was stopped.
    """

    status: Status
    exit_code: int | None
    stdout: str
    stderr: str


@dataclass
class Jail:
    """A sandbox that is to be started.

    Attributes:
        command, options: of `subprocess.Popen` and its kin.
    """

    command: list[str]
    options: dict[str, Any]
    _report: BinaryIO
    _theirs: list[int]

    def started(self) -> None:
        """Close what its processes alone need."""
        while self._theirs:
            os.close(self._theirs.pop())

    def exit_code(self, *, is_stopped: bool = False, stderr: str = "") -> int | None:
        """How its program ended, once all of its processes have; None: its time was over.

        Args:
            is_stopped: whether it was ended from here, so that it may have nothing to say.

        Raises:
            SandboxError: this machine does not allow the isolation; nothing ran.
        """
        report = {key: value for line in self._report.read().splitlines() for key, value in json.loads(line).items()}
        if "refused" in report:
            raise SandboxError(
                f"generated code is not run here: {report['refused']}. Allow unprivileged user namespaces (in a "
                "container: its seccomp or AppArmor profile), or run on another machine; there is no weaker mode"
            )
        if is_stopped or "late" in report:
            return None
        if not report:
            raise SandboxError(f"the sandbox ended without a report: {stderr[-500:]}")
        # If init ended after the program began, it ended the program, too: that is the program's failure.
        return int(report.get("exit", -signal.SIGKILL))


@contextmanager
def jailed(job: Mapping[str, Any], fds: Sequence[int] = ()) -> Iterator[Jail]:
    """A sandbox for a job (see `jail.py`), which is to be started, and to have ended, inside.

    Args:
        fds: open file descriptors that it gets, under the same numbers; they are closed here.

    Raises:
        SandboxError: this is no Linux.
    """
    report, report_in = os.pipe()
    theirs = [report_in, *fds]
    with os.fdopen(report, "rb") as reader, tempfile.TemporaryFile() as file:
        command = [sys.executable, "-I", "-S", str(_JAIL), str(file.fileno()), str(report_in)]
        env, passed = {"LANG": "C.UTF-8", "PYTHONUTF8": "1"}, (file.fileno(), *theirs)
        options = {"env": env, "cwd": "/", "pass_fds": passed, "start_new_session": True}
        jail = Jail(command, options, reader, theirs)
        try:
            if sys.platform != "linux":
                raise SandboxError(
                    f"the sandbox needs Linux namespaces, which {sys.platform} does not have: run it on Linux"
                )
            file.write(json.dumps(job).encode())
            file.seek(0)
            yield jail
        finally:
            jail.started()


def run_python(
    code: str,
    *,
    stdin: str = "",
    inputs: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
    packages: Sequence[str | Path] = (),
    fds: Sequence[int] = (),
) -> Run:
    """Run `code` as a Python program in its own sandbox and wait for it to end.

    Args:
        code: the program's text.
        stdin: its standard input.
        inputs: its initial global variables; JSON values.
        limits: None: the defaults.
        packages: directories to import from besides the standard library; they become readable.
        fds: open file descriptors that the program gets, under the same numbers; they are closed here.

    Raises:
        SandboxError: this machine does not allow the isolation; nothing ran.
    """
    limits = limits or Limits()
    folders = [str(Path(path).resolve()) for path in packages]
    job = {**asdict(limits), "code": code, "inputs": dict(inputs or {}), "fds": list(fds), "packages": folders}
    job["paths"], pipe = [*_library_paths(), *folders], subprocess.PIPE
    with jailed(job, fds) as jail, tempfile.NamedTemporaryFile() as file:
        file.write(stdin.encode())
        file.flush()
        # Opened for reading alone: the program gets no descriptor that can write to a file of the host.
        with open(file.name, "rb") as text:
            process = subprocess.Popen(jail.command, stdin=text, stdout=pipe, stderr=pipe, **jail.options)
        jail.started()
        try:
            stopped, stdout, stderr = _read(process, limits)
        finally:
            _end(process)
        ended = jail.exit_code(is_stopped=stopped is not None, stderr=stderr)
    if ended is None:
        return Run(stopped or "time", None, stdout, stderr)
    return Run("error" if ended else "ok", ended, stdout, stderr)


def command_job(
    words: Sequence[str], env: Mapping[str, str], limits: Limits, readable: Sequence[str], network: Mapping[str, Any]
) -> dict[str, Any]:
    """The job of a command for `jailed`. It may read programs of the system, its own (a Python with its packages),
    files that it names, and no others. It works in `/tmp`.

    Args:
        env: its environment, besides PATH, HOME and LANG.
        readable: more files, and folders.
        network: `port` on which something outside listens for it, and `fd`, a socket over which the listening socket is
            handed out.

    Raises:
        ConfigError: there is no such program, or no such file.
    """
    if (program := shutil.which(words[0])) is None:
        raise ConfigError(f"the agent's command cannot be started: there is no program {words[0]!r}")
    if missing := [path for path in readable if not os.path.exists(path)]:
        raise ConfigError(f"readable: {missing[0]} does not exist")
    # Its own name stays, as an environment of Python is known by it.
    program = os.path.join(os.path.realpath(os.path.dirname(program)), os.path.basename(program))
    words = [program, *(os.path.abspath(word) if os.path.isfile(word) else word for word in words[1:])]
    installed: list[Path] = []
    for path in (Path(program), Path(program).resolve()):
        folder = path.parent.parent
        is_python = (folder / "pyvenv.cfg").exists() or any(folder.glob("lib/python3*/os.py"))
        installed += [path, folder] if is_python else [path]
    listed = (*_library_paths(), "/usr", "/bin", *map(str, installed), *filter(os.path.isfile, words[1:]), *readable)
    paths = outermost(os.path.abspath(path) for path in listed if os.path.exists(path))
    usual = {"PATH": f"{os.path.dirname(program)}:/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
    return {**asdict(limits), **network, "command": words, "env": {**usual, **env}, "fds": [], "paths": paths}


@functools.cache
def require() -> None:
    """Run an empty program.

    Raises:
        SandboxError: as `run_python`.
    """
    run = run_python("")
    if run.status != "ok":
        raise SandboxError(f"the sandbox cannot run an empty program: {run}")


@functools.cache
def _library_paths() -> tuple[str, ...]:
    """Directories of the standard library and of the shared libraries that its modules load."""
    wanted = (sysconfig.get_path("stdlib"), *map(sysconfig.get_config_var, ("DESTSHARED", "LIBDIR")))
    return outermost(path for path in (*_LIBRARIES, *wanted) if path and os.path.isdir(path))


def outermost(paths: Iterable[str | Path]) -> tuple[str, ...]:
    """Paths without those that lie within another one."""
    known = dict.fromkeys(map(str, paths))
    return tuple(path for path in known if not any(path.startswith(other + "/") for other in known))


def _read(process: subprocess.Popen[bytes], limits: Limits) -> tuple[Status | None, str, str]:
    """Read the outputs until they are closed or a limit is reached, which is returned as a status."""
    deadline, room = time.monotonic() + limits.seconds + _GRACE, limits.output
    outputs: dict[Any, bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    stopped: Status | None = None
    with selectors.DefaultSelector() as selector:
        for pipe in outputs:
            selector.register(pipe, selectors.EVENT_READ)
        while stopped is None and selector.get_map():
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                piece = os.read(key.fd, min(room + 1, 1 << 16))
                outputs[key.fileobj] += piece[:room]
                if len(piece) > room:
                    stopped = "output"
                    break
                room -= len(piece)
                if not piece:
                    selector.unregister(key.fileobj)
            if time.monotonic() >= deadline:
                stopped = stopped or "time"
    stdout, stderr = (bytes(read).decode(errors="replace") for read in outputs.values())
    return stopped, stdout, stderr


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left. Init's parent gets the signal: all inside ends with init, then the processes outside end."""
    try:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):  # it has ended by itself
                os.killpg(process.pid, kind)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
                return
        raise SandboxError(f"process {process.pid} of a sandbox cannot be killed")
    finally:
        for pipe in filter(None, (process.stdout, process.stderr)):
            pipe.close()
