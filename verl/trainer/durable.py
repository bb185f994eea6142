"""Files that survive a power cut, and staging directories that a crash cannot turn into results."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

_STAGING = re.compile(r"\.staging-(\d+)-.*")
_REPLACED = ".replaced-"


def staging_of(path: Path) -> Path:
    """Where something is made that is then renamed to `path`."""
    return path.with_name(f".staging-{os.getpid()}-{path.name}")


def clear_staging(directory: Path) -> None:
    """Remove what processes that are gone left half made in a directory, and undo half a replacement."""
    for entry in directory.iterdir():
        match = _STAGING.fullmatch(entry.name)
        if match and (int(match[1]) == os.getpid() or not alive(int(match[1]))):
            try_remove(entry)
        elif entry.name.startswith(_REPLACED):
            path = entry.with_name(entry.name.removeprefix(_REPLACED))
            recover(path)
            if path.exists():
                try_remove(entry)


def write_atomic(path: Path, text: str) -> None:
    """Replace a text file whole: a reader, or a crash, sees the old content or the new."""
    staging = staging_of(path)
    try:
        with staging.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)
    sync_directory(path.parent)


def append_lines(path: Path, text: str) -> None:
    """Let whole lines follow in a file, all or none; a torn last line that a crash has left goes first.

    Raises:
        OSError: the disk does not take them.
    """
    with path.open("a+b", buffering=0) as file:
        end = _whole_lines(file)
        file.truncate(end)
        try:
            rest = memoryview(text.encode())
            while rest:
                rest = rest[file.write(rest) or 0 :]
        except OSError:
            file.truncate(end)
            raise


def link_atomic(link: Path, target: str) -> None:
    """Let a symbolic link point elsewhere, never missing in between. A convenience: failing is no error."""
    staging = staging_of(link)
    try:
        staging.unlink(missing_ok=True)
        staging.symlink_to(target)
        os.replace(staging, link)
    except OSError:
        staging.unlink(missing_ok=True)


def seal(path: Path) -> str:
    """Make a file durable; returns the SHA-256 of what can be read back."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return digest(file.fileno())


def digest(descriptor: int) -> str:
    """SHA-256 of a file from its beginning."""
    sha = hashlib.sha256()
    at = 0
    while block := os.pread(descriptor, 1 << 20, at):
        sha.update(block)
        at += len(block)
    return sha.hexdigest()


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
    """Give a finished directory its name, in place of what has it now.

    A directory cannot be replaced by one rename. Between the two that it takes, the old one is called
    `.replaced-<name>`, and `recover` puts it back.
    """
    old = _replaced(path)
    if path.exists() or path.is_symlink():
        remove(old)
        os.rename(path, old)
    os.rename(staging, path)
    sync_directory(path.parent)
    remove(old)


def recover(path: Path) -> None:
    """Undo a replacement that a crash left half done."""
    old = _replaced(path)
    if old.exists() and not path.exists():
        os.rename(old, path)


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
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _whole_lines(file: IO[bytes]) -> int:
    """Where the last whole line of a file ends."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - (1 << 16))
        file.seek(start)
        if cut := file.read(end - start).rfind(b"\n") + 1:
            return start + cut
        end = start
    return 0


def _replaced(path: Path) -> Path:
    return path.with_name(f"{_REPLACED}{path.name}")
