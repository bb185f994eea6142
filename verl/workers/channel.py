"""Messages between two processes of one run: a kind, a JSON head, and bytes.

The bytes go through the connection ("queue") or stand in shared memory, of which just the descriptor is sent
("shared_memory"); what arrives is the same. The connection is a pair of sockets that a worker inherits, or, for a
worker that may be on another machine, TCP, over which both ends prove that they know a token first (HMAC, by
`multiprocessing.connection`), and which takes no descriptors.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, Literal, get_args

from verl.errors import ConfigError, nearest

Transport = Literal["queue", "shared_memory"]
_SHARED_MEMORY = Path("/dev/shm")
#: Seconds that a message may stay unread when the connection is full.
SEND_DEADLINE = 120
#: Seconds that whoever comes to a `Door` has to prove that it knows the token.
_PROOF_DEADLINE = 10
#: Seconds of silence until probes are sent, and between them; milliseconds without an answer after which a machine is
#: gone, whether it was sent probes or messages.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_USER_TIMEOUT": 60_000}


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

    def send(self, kind: str, data: bytes = b"", **head: Any) -> None:
        """Raises OSError if the other end is gone."""
        shared = data if self.transport == "shared_memory" else b""
        packed = json.dumps([kind, head, bool(shared)]).encode()
        self._connection.send_bytes(struct.pack("<I", len(packed)) + packed + (b"" if shared else data))
        if shared:
            self._share(shared)

    def receive(self) -> Message:
        """The next message; raises EOFError or OSError if the other end is gone."""
        raw = self._connection.recv_bytes()
        (length,) = struct.unpack_from("<I", raw)
        kind, head, is_shared = json.loads(raw[4 : 4 + length])
        return Message(kind, head, self._shared() if is_shared else raw[4 + length :])

    def close(self) -> None:
        self._connection.close()

    def _share(self, data: bytes) -> None:
        # The file has no name: it is gone with the last process that holds it, however that ends.
        folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
        with tempfile.TemporaryFile(dir=folder) as file, self._socket() as sock:
            file.write(data)
            file.flush()
            socket.send_fds(sock, [b"F"], [file.fileno()])

    def _shared(self) -> mmap.mmap:
        with self._socket() as sock:
            _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
        if not descriptors:
            raise EOFError
        with open(descriptors[0], "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _socket(self) -> socket.socket:
        return socket.socket(fileno=os.dup(self._connection.fileno()))


class Door:
    """A TCP port of this machine through which one worker comes in.

    Args:
        host: the name under which the worker's machine finds this one.
    """

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0))
        self.address = f"{host}:{self._server.getsockname()[1]}"
        #: What the worker must know; told to it by the environment, which other users cannot read.
        self.token = secrets.token_hex(32)

    def admit(self, is_expected: Callable[[], bool], deadline: float) -> Connection:
        """The connection to the first that knows the token.

        Raises:
            ConnectionError: nobody came within `deadline` seconds, or nobody is expected any more.
        """
        until = time.monotonic() + deadline
        self._server.settimeout(0.2)
        with self._server:
            while is_expected() and time.monotonic() < until:
                with suppress(TimeoutError):
                    accepted, _ = self._server.accept()
                    with suppress(OSError, EOFError, AuthenticationError):  # a stranger: the next, please
                        return _prove(accepted, self.token, asks=True)
        raise ConnectionError(f"no worker came to {self.address}")


def connect(address: str, token: str) -> Connection:
    """The worker's end: of an inherited socket "fd:N", or of the `Door` at "HOST:PORT".

    Raises:
        OSError, AuthenticationError: nobody is there, or it does not know the token.
    """
    host, _, number = address.rpartition(":")
    if host == "fd":
        os.set_inheritable(int(number), False)
        return Connection(int(number))
    return _prove(socket.create_connection((host, int(number)), timeout=_PROOF_DEADLINE), token, asks=False)


def bound_sends(sock: socket.socket) -> None:
    """Sends fail that wait longer than `SEND_DEADLINE`."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_DEADLINE, 0))


def _prove(sock: socket.socket, token: str, asks: bool) -> Connection:
    """Both ends prove that they know the token, the one that `asks` second."""
    sock.setblocking(True)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _PROOF_DEADLINE, 0))
    bound_sends(sock)
    connection = Connection(os.dup(sock.fileno()))
    try:
        for prove in (deliver_challenge, answer_challenge) if asks else (answer_challenge, deliver_challenge):
            prove(connection, token.encode())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    except BaseException:
        connection.close()
        raise
    finally:
        sock.close()
    return connection
