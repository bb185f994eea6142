"""Durable files: atomic replacement, staging directories that a crash cannot turn into results, strict JSON.

A file that is being written has a staging name with its process, until it is complete. Staging is deleted
when that process is known to have ended: it ran on this host, and its pid is free or belongs to a later process.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import socket
import stat
import sys
import weakref
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, Annotated, Any, AnyStr, Generic

from pydantic import Field, TypeAdapter, ValidationError

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

#: Names of what is being made and of what makes room for it: the process, and the name meanwhile taken away.
_MARKED = re.compile(r"\.(staging|replaced)-([^~]+)~(\d{1,9})~([0-9a-f]*)~(.*)", re.DOTALL)
#: Most bytes of a JSON file that is read. The parser refuses more than 200 levels of nesting by itself.
MAX_JSON_BYTES = 1 << 27
_adapter = cache(TypeAdapter)


@dataclass(frozen=True)
class Process:
    """A process of any host. `started` (a digest of boot and clock ticks; "" where the system does not say) tells it
    from an earlier one with its pid."""

    host: str
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    started: str

    @classmethod
    def current(cls) -> Process:
        return cls(socket.gethostname(), os.getpid(), _started(os.getpid()))

    @property
    def ended(self) -> bool:
        """Whether it is certain that it runs no more: never of a process of another host."""
        if self.host != socket.gethostname():
            return False
        return not alive(self.pid) or self.started not in ("", _started(self.pid))


def staging_of(path: Path, kind: str = "staging") -> Path:
    """Where this process makes what is then renamed to `path`; "replaced": where it puts what stood there."""
    process = Process.current()
    return path.with_name(f".{kind}-{process.host}~{process.pid}~{process.started}~{path.name}")


def clear_staging(directory: Path, *, alone: bool = False) -> None:
    """Remove what this process and processes that have ended left half made in a directory, and undo half a
    replacement. With `alone`, a lock says that nobody else writes there: what processes of other hosts left goes, too.
    """
    for entry in list(directory.iterdir()):
        if match := _MARKED.fullmatch(entry.name):
            kind, host, pid, started, name = match.groups()
            owner = Process(host, int(pid), started)
            if kind == "replaced" and not os.path.lexists(entry.with_name(name)):
                os.rename(entry, entry.with_name(name))
            elif alone or owner.ended or owner == Process.current():
                try_remove(entry)


def read_json(path: Path, schema: Any) -> Any:
    """The content of a JSON file, checked by a pydantic schema in strict mode.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is too large, is no JSON, is nested too deep, or does not pass the schema.
    """
    if path.exists() and not path.is_file():  # opening a pipe or a device may never end
        raise ValueError("it is no regular file")
    with path.open("rb") as file:
        return parse_json(file.read(MAX_JSON_BYTES + 1), schema)


def parse_json(raw: bytes, schema: Any) -> Any:
    """`read_json` of bytes."""
    if len(raw) > MAX_JSON_BYTES:
        raise ValueError(f"it has more than {MAX_JSON_BYTES} bytes")
    try:
        return _adapter(schema).validate_json(raw, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from None


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file whole: a reader, or a crash, sees the old content or the new.

    Raises:
        OSError: something else has the name, such as a device, a pipe or a link, or the disk refuses.
    """
    staging = staging_of(path)
    try:
        with staging.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(path.lstat().st_mode):
                raise FileExistsError(errno.EEXIST, "it is no regular file, and is not replaced", str(path))
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)
    sync_directory(path.parent)


def append_lines(path: Path, text: str) -> None:
    """Append whole lines to a file, all or none; a torn last line that a crash has left is removed first.

    Raises:
        OSError: the disk does not take them.
    """
    with path.open("a+b", buffering=0) as file:
        end = 0  # of the last whole line
        if file.seek(0, os.SEEK_END):
            with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
                end = content.rfind(b"\n") + 1
        _append_at(file, end, text.encode())


def _append_at(file: IO[bytes], end: int, content: bytes) -> int:
    """Let the content follow what a file has up to `end`, all or none; returns the new end."""
    file.truncate(end)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) or 0 :]
    except OSError:
        file.truncate(end)
        raise
    return end + len(content)


class LineFile(Generic[AnyStr]):
    """A file that lines are appended to. Lines that the disk refuses are retried with the next ones (the latest 100,000
    of them); a warning says so once each time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: deque[AnyStr] = deque(maxlen=100_000)
        self._is_refused = False

    def append(self, *lines: AnyStr) -> None:
        self._waiting += lines
        try:
            self._write(self._waiting)
        except OSError as error:
            if not self._is_refused:
                self._is_refused = True  # first, as the warning may be a line of this file
                logger.warning("%s takes no lines (%s): they wait, and follow when it does", self.path, error)
        else:
            self._waiting.clear()
            self._is_refused = False

    def _write(self, lines: Iterable[Any]) -> None:
        append_lines(self.path, "".join(lines))


class RecordFile(LineFile[bytes]):
    """The same of a new file of binary records."""

    _end = 0

    def _write(self, lines: Iterable[bytes]) -> None:
        with self.path.open("ab", buffering=0) as file:
            self._end = _append_at(file, min(self._end, file.seek(0, os.SEEK_END)), b"".join(lines))


#: Locked files. A fork would share their locks, and keep them for as long as it lives.
_locked: weakref.WeakSet[IO[Any]] = weakref.WeakSet()


def _leave_locks() -> None:
    """Another file takes the place of each, as the objects that hold them will close them."""
    with open(os.devnull, "wb") as nothing:
        for file in [*_locked]:
            if not file.closed:
                os.dup2(nothing.fileno(), file.fileno(), inheritable=False)


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_leave_locks)


def lock_file(path: Path) -> IO[bytes] | None:
    """A file that is locked for this process until it is closed, which the system does however the process ends; None:
    another one has it. Windows has no such lock.

    Raises:
        OSError: the file cannot be made, or the file system has no locks.
    """
    file = path.open("ab")
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        _locked.add(file)
    return file


def link_atomic(link: Path, target: str) -> None:
    """Replace a symbolic link, and nothing else, atomically. A failure is no error: links are a convenience."""
    staging = staging_of(link)
    try:
        staging.unlink(missing_ok=True)
        staging.symlink_to(target)
        if link.is_symlink() or not link.exists():
            os.replace(staging, link)
    except OSError as error:
        logger.debug("the link %s was not written: %s", link, error)
    finally:
        try_remove(staging)


def seal_all(paths: Iterable[Path], root: Path) -> dict[str, dict[str, Any]]:
    """Make files durable as they come: `sha256` and `size` of each, by its path below `root`."""
    # Hashing and syncing a file takes as long as writing it, so it goes on beside the writing of the next.
    with ThreadPoolExecutor(1, thread_name_prefix="verl-seal") as sealer:
        seals = {path: sealer.submit(digest, path, seal=True) for path in paths}
    return {
        path.relative_to(root).as_posix(): {"sha256": sealed.result(), "size": path.stat().st_size}
        for path, sealed in seals.items()
    }


def digest(file: str | Path | int, *, seal: bool = False) -> str:
    """SHA-256 of a file, or of one that is open, by its descriptor, from its beginning; with `seal` it is made durable
    first."""
    with open(file, "rb", closefd=not isinstance(file, int)) as opened:
        if seal:
            os.fsync(opened.fileno())
        opened.seek(0)
        return hashlib.file_digest(opened, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable (on Windows a directory cannot be opened for that)."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(staging: Path, path: Path) -> None:
    """Give a finished directory its name, replacing what had it.

    A directory cannot be replaced by one rename. Between the two that it takes, the old one has a name that says so,
    and `recover` puts it back.
    """
    old = staging_of(path, "replaced")
    if path.exists() or path.is_symlink():
        remove(old)
        os.rename(path, old)
    os.rename(staging, path)
    sync_directory(path.parent)
    remove(old)


def recover(path: Path) -> None:
    """Undo a replacement that a crash left half done."""
    if path.exists() or not path.parent.is_dir():
        return
    for entry in path.parent.iterdir():
        match = _MARKED.fullmatch(entry.name)
        if match and (match[1], match[5]) == ("replaced", path.name):
            os.rename(entry, path)
            return


def remove(path: Path) -> None:
    """Delete a file, a link or a whole directory; none there is fine."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def try_remove(path: Path) -> None:
    """`remove`; on a disk that refuses, what should go stays."""
    try:
        remove(path)
    except OSError as error:
        logger.debug("%s cannot be removed: %s", path, error)


def alive(pid: int) -> bool:
    """Whether a process of this machine has that id."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # of another user
    return True


def _started(pid: int) -> str:
    """When a process began: a digest of the boot and the clock ticks since."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return hashlib.sha256(f"{boot_id()}:{stat.rpartition(')')[2].split()[19]}".encode()).hexdigest()[:8]


def boot_id() -> str:
    """What tells this machine, since it was started, from others, whatever its host name; "": unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
