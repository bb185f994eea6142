"""Programs that try to get out of the sandbox, to stay, or to use more than they may."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from verl import sandbox
from verl.errors import ConfigError, SandboxError
from verl.sandbox import Limits, Run, run_python

SHORT = Limits(seconds=1.0)


def inside() -> set[str]:
    """Processes of this machine that live in another process namespace than we do."""
    ours, found = os.readlink("/proc/self/ns/pid"), set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/ns/pid") != ours:
                found.add(pid)
        except OSError:
            continue
    return found


def test_a_program_reads_writes_and_ends() -> None:
    run = run_python("print(input() + word)", stdin="a\n", inputs={"word": "b"})
    assert (run.status, run.exit_code, run.stdout) == ("ok", 0, "ab\n")
    run = run_python("import sys\nprint('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert (run.status, run.exit_code, run.stdout, run.stderr) == ("error", 3, "out\n", "err\n")
    run = run_python("x = 0\n1 / x")
    assert run.status == "error"
    assert "line 2, in <module>\n    1 / x" in run.stderr and "jail" not in run.stderr
    assert run_python("import os; os.kill(os.getpid(), 9)").exit_code == -9
    assert (
        run_python("import hashlib, zlib, json, sqlite3, ctypes, asyncio; asyncio.run(asyncio.sleep(0))").status == "ok"
    )


def test_the_host_is_out_of_sight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "answer"
    secret.write_text("42")
    os.chmod(secret, 0o644)
    monkeypatch.setenv("SECRET", "42")
    program = f"""
import os
for path in ({str(secret)!r}, "/etc/passwd", "/proc/self/environ", "/proc/1/cmdline", "/old", "/sys", "/home"):
    assert not os.path.exists(path), path
os.symlink("/proc/1/root{secret}", "/tmp/link")
os.symlink("../../../..{secret}", "/tmp/up")
assert not os.path.exists("/tmp/link") and not os.path.exists("/tmp/up")
assert "SECRET" not in os.environ
assert os.getuid() != 0 and os.getppid() == 1
print(sorted(os.listdir("/tmp")), os.uname().nodename)
"""
    run = run_python(program)
    assert run.stdout == "['link', 'up'] sandbox\n", run


def test_libraries_cannot_be_written() -> None:
    program = """
import os
open("/tmp/mine", "w").write("x")
try:
    open(os.path.join(os.path.dirname(os.__file__), "mine.py"), "w")
except OSError as error:
    print(error.errno)
"""
    run = run_python(program)
    assert run.stdout in ("30\n", "13\n"), run  # read-only file system, or another's directory


@pytest.mark.parametrize(
    "attempt",
    [
        "import socket; socket.socket(socket.AF_INET)",
        "import socket; socket.socket(40)",  # to a virtual machine's host: knows no network namespace
        "import socket; socket.create_connection(('127.0.0.1', 80), 1)",
        "import os; os.chroot('/tmp')",
        "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
        "import ctypes; assert ctypes.CDLL(None).mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None) == 0",
        "import ctypes; assert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0",
        "import os; os.memfd_create('unbounded')",
        "import ctypes; assert ctypes.CDLL(None).shmget(0, 1 << 30, 0o1600) >= 0",
        "import os; os.setuid(0)",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "import fcntl, os; fcntl.fcntl(os.open(os.path.dirname(os.__file__), 0), fcntl.F_NOTIFY, fcntl.DN_ACCESS)",
        "import fcntl, os; fcntl.fcntl(open(os.__file__), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    ],
)
def test_ways_out_are_closed(attempt: str) -> None:
    run = run_python(attempt, limits=SHORT)
    assert run.status == "error", run
    assert any(name in run.stderr for name in ("PermissionError", "AssertionError", "ValueError", "OSError")), run


def test_no_lock_of_a_program_reaches_a_file_of_the_host(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "mine.py").write_text("value = 7")
    program = """
import fcntl, mine, time
file, other = open(mine.__file__), open(mine.__file__)
{lock}
time.sleep(1)
print("locked")
"""
    with (tmp_path / "mine.py").open("r+") as file, ThreadPoolExecutor(1) as thread:
        for lock in ("fcntl.flock(file, fcntl.LOCK_EX)", "fcntl.lockf(file, fcntl.LOCK_SH)"):
            running = thread.submit(run_python, program.format(lock=lock), packages=[tmp_path])
            while not running.done():
                for take in (fcntl.flock, fcntl.lockf):
                    take(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    take(file, fcntl.LOCK_UN)
                time.sleep(0.01)
            assert running.result().stdout == "locked\n", running.result()


def test_a_program_may_write_a_database() -> None:
    program = """
import sqlite3
for text in ("create table t(x)", "insert into t values (7)", "select x from t"):
    with sqlite3.connect("/tmp/mine.db") as base:
        rows = list(base.execute(text))
print(rows)
"""
    assert run_python(program).stdout == "[(7,)]\n"


def test_init_cannot_be_killed_and_the_program_takes_nobody_along() -> None:
    kill = (
        "import os\ntry:\n    os.kill({}, 9)\nexcept OSError as error:\n    print(type(error).__name__)\nprint('here')"
    )
    for target in (1, -1):
        assert run_python(kill.format(target)).stdout.endswith("here\n")


AS_NOBODY = """
import dataclasses, json, sys, types
sys.modules["verl"] = package = types.ModuleType("verl")
package.__path__ = [sys.argv[1]]
from verl.sandbox import Limits, run_python
print(json.dumps(dataclasses.asdict(run_python(sys.argv[2], limits=Limits(seconds=2.0)))))
"""


def run_as_nobody(program: str) -> Run:
    """Started by an ordinary user: then a program and its init are the same user."""
    nobody = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}

    def start(python: str, program: str) -> subprocess.CompletedProcess[str]:
        command = [python, "-B", "-c", AS_NOBODY, str(Path(sandbox.__file__).parents[1]), program]
        return subprocess.run(command, cwd="/", capture_output=True, text=True, **nobody)  # type: ignore[call-overload, no-any-return]

    for python in (sys.executable, "/usr/bin/python3"):
        with suppress(OSError):
            if start(python, "").returncode == 0:
                done = start(python, program)
                assert done.returncode == 0, done.stderr
                return Run(**json.loads(done.stdout))
    pytest.skip("an ordinary user can run no Python here, or read no checkout")


def test_no_signal_of_a_program_ends_its_init() -> None:
    program = """
import os, signal
for number in sorted(signal.valid_signals()):
    os.kill(1, number)
print("here", signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGINT).__name__)
"""
    run = run_as_nobody(program)
    assert (run.status, run.stdout) == ("ok", "here set() default_int_handler\n"), run
    start = time.monotonic()
    run = run_as_nobody("import os\nwhile True: os.kill(1, 15); print('x' * 1000)")
    assert run.status == "output", run
    assert time.monotonic() - start < 15  # the order to end got through


def test_a_program_that_ends_its_init_has_failed() -> None:
    # A process may bound the CPU time of another of its user, and for that the kernel kills even an init.
    program = """
import os, resource, signal
resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))
while True: os.kill(1, signal.SIGCHLD)
"""
    run = run_as_nobody(program)
    assert (run.status, run.exit_code) == ("error", -9), run


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass", "time"),
        ("import signal\nfor s in range(1, 65):\n    try:\n        signal.signal(s, signal.SIG_IGN)\n"
         "    except (OSError, ValueError):\n        pass\nwhile True: pass", "time"),
        ("import time; time.sleep(600)", "time"),
        ("import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n"
         "    os._exit(0)", "ok"),
        ("while True: print('x' * 1000000)", "output"),
        ("import os\nwhile True: os.write(2, b'x' * 1000000)", "output"),
        ("x = bytearray(2 << 30)", "error"),
        ("import threading, time\nfor _ in range(100): threading.Thread(target=time.sleep, args=(600,)).start()",
         "time"),
        ("while True: open('/tmp/big', 'ab').write(b'x' * 1000000)", "error"),
        ("for i in range(100000): open(f'/tmp/{i}', 'w').close()", "error"),
    ],
    ids=["fork bomb", "ignored signals", "sleep", "daemon", "output", "errors", "memory", "threads", "disk", "inodes"],
)  # fmt: skip
def test_bounds_hold_and_nothing_stays(program: str, status: str) -> None:
    before, start = inside(), time.monotonic()
    run = run_python(program, limits=SHORT)
    assert run.status == status, run
    assert len(run.stdout) + len(run.stderr) <= SHORT.output
    assert time.monotonic() - start < 60
    stayed = inside() - before
    while stayed and time.monotonic() - start < 60:  # sandboxes of other tests come and go
        time.sleep(0.5)
        stayed &= inside()
    assert not stayed


def test_an_unread_standard_input_does_not_stall() -> None:
    assert run_python("print(1)", stdin="x" * (1 << 22)).stdout == "1\n"
    assert run_python("print(len(input()))", stdin="x" * (1 << 22) + "\n").stdout == f"{1 << 22}\n"


def test_packages_are_what_is_given(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "mine.py").write_text("value = 7")
    assert run_python("import mine; print(mine.value)", packages=[tmp_path]).stdout == "7\n"
    assert run_python("import mine").status == "error"
    assert run_python("import torch").status == "error"


def test_where_isolation_is_missing_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A library that is not there cannot be mounted: the sandbox cannot be built.
    monkeypatch.setattr(sandbox.run, "_library_paths", lambda: ("/lib", str(tmp_path / "gone")))
    marker = tmp_path / "ran"
    with pytest.raises(SandboxError, match=r"not run here: mount .*gone: No such file"):
        run_python(f"open({str(marker)!r}, 'w')")
    assert not marker.exists()


def test_limits_must_be_positive() -> None:
    with pytest.raises(ConfigError, match=r"Limits\.seconds: must be more than 0"):
        Limits(seconds=0)
