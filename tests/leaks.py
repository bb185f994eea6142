"""A session of tests fails if it leaves something behind: a mount, a process, a listening socket, a file in /dev/shm, a
session of Ray.

Whatever the tests start inherits `MARK` with the pid of the first pytest process, by which it is found.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from tests import forked

#: The environment variable that all processes of a session have.
MARK = "VERL_TEST_SESSION"
#: Seconds that processes have to end by themselves once the last test is over.
GRACE = 10.0
#: Exit status of a session that left something behind, whatever else it was: no number of pytest's.
LEFT_BEHIND = 10

_SHM, _MOUNTS = Path("/dev/shm"), Path("/proc/self/mountinfo")


def mounts() -> set[str]:
    """Where file systems are mounted."""
    return {line.split()[4] for line in _MOUNTS.read_text().splitlines()} if _MOUNTS.exists() else set()


def shared_memory() -> set[str]:
    return {str(path) for path in _SHM.iterdir()} if _SHM.is_dir() else set()


def processes(session: str) -> Iterator[str]:
    """The processes of a session but for this one, in words, zombies left out."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = dict(
                entry.split("=", 1)
                for entry in (folder / "environ").read_text(errors="replace").split("\0")
                if "=" in entry
            )
            command = (folder / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
            inodes = {os.readlink(fd) for fd in (folder / "fd").iterdir()}
        except OSError:
            continue
        if environment.get(MARK) != session or folder.name == str(os.getpid()) or not command:
            continue
        if Path(command).name == "torch_shm_manager":  # it ends with the last process that shares memory through it
            continue
        ports = sorted(port for inode, port in _listeners().items() if inode in inodes)
        listens = f", which listens on {', '.join(map(str, ports))}" if ports else ""
        test = environment.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)")
        yield f"process {folder.name}{listens}: {command[:160]}" + (f" (started by {test})" if test else "")


def _listeners() -> dict[str, int]:
    """Link of a listening TCP socket -> its port."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if Path(table).exists():
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A":
                    found[f"socket:[{words[9]}]"] = int(words[1].rpartition(":")[2], 16)
    return found


class Leaks:
    """Watches one session.

    Args:
        session: what its processes have as `MARK`.
    """

    def __init__(self, session: str) -> None:
        self._session = session
        self._mounts, self._shared = mounts(), shared_memory()

    def found(self) -> list[str]:
        """What is there that was not when the session began, after `GRACE` at most."""
        end = time.monotonic() + GRACE
        while (left := self._now()) and time.monotonic() < end:
            time.sleep(0.2)
        return left

    def _now(self) -> list[str]:
        left = [f"a mount on {path}" for path in sorted(mounts() - self._mounts)]
        left += sorted(processes(self._session))
        # What a process holds may be of another session at the same time.
        left += [f"{path} in shared memory" for path in sorted(shared_memory() - self._shared) if not _is_held(path)]
        return left


def _is_held(path: str) -> bool:
    """Whether a process has the file open or mapped."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if path in (folder / "maps").read_text(errors="replace"):
                return True
            if any(os.readlink(fd) == path for fd in (folder / "fd").iterdir()):
                return True
        except OSError:
            continue
    return False


_LEAKS = pytest.StashKey[Leaks]()


def pytest_configure(config: pytest.Config) -> None:
    if MARK not in os.environ:  # the processes of xdist have it, and leave the check to the first
        os.environ[MARK] = str(os.getpid())
        # Ray keeps the logs of each of its sessions: these go with this directory. Its sockets want a short path.
        os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray leaves one in the home directory
        config.stash[_LEAKS] = Leaks(os.environ[MARK])


@pytest.hookimpl(trylast=True)  # when the processes of xdist have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    leaks = session.config.stash.get(_LEAKS, None)
    if leaks is None:
        return
    # What ends with this process is nothing left behind.
    forked.stop()  # which would end with a pipe that processes forked from this one, such as a reward's, hold open too
    atexit._run_exitfuncs()
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
    left = leaks.found()
    shutil.rmtree(os.environ.pop("RAY_TMPDIR"), ignore_errors=True)
    del os.environ[MARK]
    if left:
        write = session.config.get_terminal_writer().line
        write()
        write("The session left behind:", red=True)
        for thing in left:
            write(f"  {thing}", red=True)
        session.exitstatus = LEFT_BEHIND
