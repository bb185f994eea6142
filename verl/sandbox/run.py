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
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from verl.errors import ConfigError, SandboxError

_JAIL = Path(__file__).with_name("jail.py")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
#: Seconds for a program's processes to start and to be ended.
_GRACE = 20.0

Status = Literal["ok", "error", "time", "output"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: of wall-clock time, and of CPU time of each process.
        memory: bytes of address space of each process.
        processes: processes and threads at a time.
        output: bytes of stdout and stderr together.
        disk: bytes of files, which are in memory.

    Raises:
        ConfigError: one of them is not positive.
    """

    seconds: float = 10.0
    memory: int = 512 << 20
    processes: int = 8
    output: int = 64 << 10
    disk: int = 16 << 20

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ConfigError(f"sandbox: {name} must be positive, got {value}")


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
    if sys.platform != "linux":
        raise SandboxError(f"the sandbox needs Linux namespaces, which {sys.platform} does not have: run it on Linux")
    folders = [str(Path(path).resolve()) for path in packages]
    job = {**asdict(limits), "code": code, "inputs": dict(inputs or {}), "fds": list(fds), "packages": folders}
    job["paths"] = [*_library_paths(), *folders]
    report, report_in = os.pipe()
    with os.fdopen(report, "rb") as reader, tempfile.TemporaryFile() as file:
        try:
            file.write(json.dumps(job).encode())
            file.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_JAIL), str(file.fileno()), str(report_in)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"LANG": "C.UTF-8", "PYTHONUTF8": "1"},
                cwd="/",
                pass_fds=(file.fileno(), report_in, *fds),
                start_new_session=True,
            )
        finally:
            for fd in (report_in, *fds):
                os.close(fd)
        try:
            stopped, stdout, stderr = _converse(process, stdin.encode(), limits)
        finally:
            _end(process)
        said = reader.read()
    return _outcome(said, stopped, stdout, stderr)


@functools.cache
def require() -> None:
    """Run an empty program.

    Raises:
        SandboxError: as `run_python`.
    """
    run = run_python("")
    if run.status != "ok":
        raise SandboxError(f"the sandbox cannot run an empty program: {run}")


def _outcome(said: bytes, stopped: Status | None, stdout: str, stderr: str) -> Run:
    report = {key: value for line in said.splitlines() for key, value in json.loads(line).items()}
    if "refused" in report:
        raise SandboxError(
            f"generated code is not run here: {report['refused']}. Allow unprivileged user namespaces (in a container: "
            "its seccomp or AppArmor profile), or run on another machine; there is no weaker mode"
        )
    if stopped or "late" in report:
        return Run(stopped or "time", None, stdout, stderr)
    if not report:
        raise SandboxError(f"the sandbox ended without a report: {stderr[-500:]}")
    # If init ended after the program began, it ended the program, too: that is the program's failure.
    code = report.get("exit", -signal.SIGKILL)
    return Run("error" if code else "ok", code, stdout, stderr)


@functools.cache
def _library_paths() -> tuple[str, ...]:
    """Directories of the standard library and of the shared libraries that its modules load."""
    wanted = (sysconfig.get_path("stdlib"), *map(sysconfig.get_config_var, ("DESTSHARED", "LIBDIR")))
    existing = dict.fromkeys(str(path) for path in (*_LIBRARIES, *wanted) if path and os.path.isdir(path))
    return tuple(path for path in existing if not any(path.startswith(other + "/") for other in existing))


def _converse(process: subprocess.Popen[bytes], stdin: bytes, limits: Limits) -> tuple[Status | None, str, str]:
    """Write stdin and read the outputs until they are closed, or a limit is reached, which is returned as a status."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    deadline = time.monotonic() + limits.seconds + _GRACE
    outputs = {process.stdout: bytearray(), process.stderr: bytearray()}
    room, stopped = limits.output, None
    with selectors.DefaultSelector() as selector:
        for pipe in outputs:
            selector.register(pipe, selectors.EVENT_READ)
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        while stopped is None and any(pipe in selector.get_map() for pipe in outputs):
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                if key.fileobj is process.stdin:
                    stdin = _feed(process.stdin, stdin, selector)
                    continue
                piece = os.read(key.fd, min(room + 1, 1 << 16))
                outputs[key.fileobj] += piece[:room]  # type: ignore[index]
                if len(piece) > room:
                    stopped = "output"
                    break
                room -= len(piece)
                if not piece:
                    selector.unregister(key.fileobj)
            if time.monotonic() >= deadline:
                stopped = stopped or "time"
    stdout, stderr = (bytes(read).decode(errors="replace") for read in outputs.values())
    return stopped, stdout, stderr  # type: ignore[return-value]


def _feed(pipe: Any, data: bytes, selector: selectors.BaseSelector) -> bytes:
    sent = 0
    with suppress(BrokenPipeError):
        sent = os.write(pipe.fileno(), data[: 1 << 16]) if data else 0
    if sent == 0 or sent == len(data):
        selector.unregister(pipe)
        pipe.close()
    return data[sent:]


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
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
