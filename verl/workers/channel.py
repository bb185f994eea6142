"""Messages between two processes of one run: a kind, a JSON head, and bytes. Nothing is pickled.

The bytes go through the connection ("queue") or through a file in shared memory of which just the name is sent
("shared_memory"); what arrives is the same.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, get_args

from verl.errors import ConfigError, nearest

Transport = Literal["queue", "shared_memory"]
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Message:
    """What was sent; `data` may be a view of shared memory that lives as long as it is held."""

    kind: str
    head: dict[str, Any]
    data: bytes | mmap.mmap


class Channel:
    """One end of a connection. One thread sends and one thread receives.

    Raises:
        ConfigError: there is no such transport.
    """

    def __init__(self, connection: Connection, transport: str = "shared_memory") -> None:
        if transport not in get_args(Transport):
            raise ConfigError(f"there is no transport '{transport}': {nearest(transport, get_args(Transport))}")
        self._connection = connection
        self.transport = transport
        self._files: list[Path] = []

    def send(self, kind: str, data: bytes = b"", **head: Any) -> None:
        """Raises OSError if the other end is gone."""
        if data and self.transport == "shared_memory":
            head, data = {**head, "file": str(self._store(data))}, b""
        packed = json.dumps([kind, head]).encode()
        self._connection.send_bytes(struct.pack("<I", len(packed)) + packed + data)

    def poll(self, timeout: float | None) -> bool:
        """Whether a message, or the end of the connection, is there within `timeout` seconds."""
        return self._connection.poll(timeout)

    def receive(self) -> Message:
        """The next message; raises EOFError or OSError if the other end is gone."""
        raw = self._connection.recv_bytes()
        (length,) = struct.unpack_from("<I", raw)
        kind, head = json.loads(raw[4 : 4 + length])
        file = head.pop("file", None)
        if file is None:
            return Message(kind, head, raw[4 + length :])
        with open(file, "rb") as opened:
            os.unlink(file)
            return Message(kind, head, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))

    def close(self) -> None:
        self._connection.close()
        for file in self._files:
            with suppress(OSError):
                file.unlink()

    def _store(self, data: bytes) -> Path:
        # Those that have been read are gone; what is left of a dead reader is removed by `close`.
        self._files = [file for file in self._files if file.exists()]
        folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
        handle, name = tempfile.mkstemp(prefix="verl-", dir=folder)
        self._files.append(Path(name))
        with open(handle, "wb") as file:
            file.write(data)
        return self._files[-1]
