"""Format versions of files on disk: files of another version of verl are read, or refused by name.

`docs/compatibility.md` says how long an old one is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from verl._base.durable import read_json, write_atomic
from verl.errors import CheckpointError, ConfigError, VerlError


@dataclass(frozen=True)
class Schema:
    """The versions of one kind of thing on disk.

    Attributes:
        key: what a thing calls its version.
        current: the version that is written.
        oldest: the first that is read; all from it to `current` are.
        error: raised for any other.
        instead: what to do without another version of verl.
    """

    key: str
    current: int
    oldest: int
    error: type[VerlError]
    instead: str

    def check(self, version: object, where: str) -> None:
        """Refuse a version that is not read. None: the thing says none, so it is of version 1.

        Args:
            where: names the thing in messages.

        Raises:
            self.error: the version is no number of one, or not read; the message says what to do.
        """
        version = 1 if version is None else version
        if type(version) is not int or version < 1:
            raise self.error(f"{where}: {self.key} must be a whole number of at least 1, not {version!r}")
        if self.oldest <= version <= self.current:
            return
        read = str(self.current) if self.oldest == self.current else f"{self.oldest} to {self.current}"
        if version > self.current:
            way = "it was written by a newer version: install that one"
        else:
            way = "go on with the version that wrote it"
        raise self.error(
            f"{where} has {self.key} {version}, and this version of verl reads {self.key} {read}: {way}, or "
            f"{self.instead}"
        )


CHECKPOINT = Schema("format", 4, 4, CheckpointError, "start anew (--fresh)")
RUN = Schema("schema", 1, 1, ConfigError, "start anew (--fresh)")
SETTINGS = Schema("schema", 1, 1, ConfigError, "write the settings as `verl config` shows them")

#: Of a run's directory: the version of all that is in it but checkpoints and settings, which have their own.
RUN_FILE = "run.json"


@dataclass(frozen=True)
class _Run:
    schema: int


def write_run_schema(directory: Path) -> None:
    """Write `run.json` into a run's directory.

    Raises:
        OSError: the disk does not take it.
    """
    write_atomic(directory / RUN_FILE, json.dumps({RUN.key: RUN.current}) + "\n")


def check_run_schema(directory: Path) -> None:
    """Refuse a run's directory that this version of verl does not read.

    Raises:
        ConfigError: it has another version, or `run.json` is damaged.
    """
    file = directory / RUN_FILE
    try:
        version = read_json(file, _Run).schema if file.exists() else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is damaged ({error}): put it back, or {RUN.instead}") from error
    RUN.check(version, f"the run directory {directory}")
