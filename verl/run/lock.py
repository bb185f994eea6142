"""The lock of a run: one process works on it at a time, and the lock ends with that process, on whatever host.

The system's lock on the file is the lock: it goes when its process goes, and a forked child does not have it. It
holds between hosts where the file system shares locks. Not all do, so the file is also a lease: it names the holder,
who touches it every few seconds, and a process that finds there one of another machine looks first whether that still
does.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from verl._base.durable import Process, boot_id, lock_file, parse_json
from verl.errors import ConfigError

logger = logging.getLogger(__name__)

#: Seconds between two touches, and how long a file must be left untouched before its holder counts as gone.
RENEWAL, LEASE = 5.0, 30.0


@dataclass(frozen=True)
class _Holder(Process):
    boot: str = ""


class RunLock:
    """Held from the constructor to `close`, or to the end of this process.

    Raises:
        ConfigError: another process works on the run.
        OSError: the file cannot be made.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._closed = run, threading.Event()
        self._own = _Holder(**asdict(Process.current()), boot=boot_id())
        self.path = run.with_name(f".{run.name}.lock")
        shared = sys.platform != "win32"
        try:
            file = lock_file(self.path)
        except OSError as error:
            logger.info("%s cannot be locked (%s): its holder is known by renewing it", self.path, error.strerror)
            file, shared = self.path.open("ab"), False
        if file is None:
            raise self._held(self._holder())
        self._file = file
        try:
            self._take(shared)
        except BaseException:
            self._file.close()
            raise
        threading.Thread(target=self._renew, name="verl-run-lock", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        if not self._file.closed:
            if self._holder() == self._own:
                self._file.truncate(0)
            self._file.close()

    def _take(self, shared: bool) -> None:
        holder = self._holder()
        if holder is not None and holder != self._own:
            # On one machine the lock says it all.
            gone = holder.ended or (shared and holder.boot == self._own.boot != "")
            if not gone and self._is_renewed(holder):
                raise self._held(holder)
        self._file.truncate(0)
        self._file.write(json.dumps(asdict(self._own)).encode())
        self._file.flush()

    def _is_renewed(self, holder: Process) -> bool:
        logger.warning(
            "process %d on %s worked on the run %s last: waiting %.0f s whether it still does",
            holder.pid, holder.host, self._run, LEASE,
        )  # fmt: skip
        first, until = self.path.stat().st_mtime_ns, time.monotonic() + LEASE
        while time.monotonic() < until:
            time.sleep(min(LEASE / 10, 1.0))
            if self.path.stat().st_mtime_ns != first:
                return True
        return False

    def _renew(self) -> None:
        while not self._closed.wait(RENEWAL):
            try:
                os.utime(self._file.fileno())
            except (OSError, ValueError) as error:  # ValueError: closed meanwhile
                logger.debug("%s was not renewed: %s", self.path, error)

    def _holder(self) -> _Holder | None:
        try:
            return parse_json(self.path.read_bytes(), _Holder)  # type: ignore[no-any-return]
        except (OSError, ValueError):
            return None

    def _held(self, holder: Process | None) -> ConfigError:
        who = "another process" if holder is None else f"process {holder.pid} on {holder.host}"
        return ConfigError(
            f"{who} works on the run {self._run}: wait for it or stop it, or choose another trainer.run_name"
        )
