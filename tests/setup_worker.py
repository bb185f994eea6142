"""Stands where Ray and xdist start their workers: asks the server of `tests/forked.py` for a process that does what
this one was asked to do, and ends with it.

Ray, which knows its own such script by this file's name, imports itself here and again in the worker; torch,
transformers and this package come on top. This imports next to nothing.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence

#: The environment variable with the path of the server's socket.
ADDRESS = "VERL_TEST_SERVER"
#: Seconds until the server has imported the libraries.
DEADLINE = 240.0
_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="


def fork(
    line: Sequence[str],
    environment: Mapping[str, str],
    streams: Sequence[int],
    folder: str,
    *,
    new_session: bool = False,
) -> tuple[socket.socket, int]:
    """A process forked from the server: what it leaves at its end, read by `exit_code`, and its pid.

    Args:
        line: arguments of the interpreter.
        streams: file descriptors of its stdin, stdout and stderr.
    """
    server, end = socket.socket(socket.AF_UNIX), time.monotonic() + DEADLINE
    while server.connect_ex(environment[ADDRESS]):
        if time.monotonic() > end:
            raise TimeoutError(f"nothing forks processes at {environment[ADDRESS]}")
        time.sleep(0.02)
    socket.send_fds(server, [b" "], streams)
    order = {"line": line, "environment": dict(environment), "folder": folder, "new_session": new_session}
    server.sendall(json.dumps(order).encode())
    server.shutdown(socket.SHUT_WR)
    return server, int.from_bytes(server.recv(4, socket.MSG_WAITALL), "big")


def exit_code(end: socket.socket) -> int:
    """Of the process, once it has ended; negative: the signal that killed it."""
    told = end.recv(4, socket.MSG_WAITALL)
    return int.from_bytes(told, "big", signed=True) if told else -9  # the server is gone, and so are its processes


def main() -> None:
    environment, line = dict(os.environ), sys.argv[1:]
    while line[0].startswith((_CONTEXT, _LANGUAGE)) or line[0] == "-u":
        if (option := line.pop(0)).startswith(_CONTEXT):
            environment |= json.loads(option.removeprefix(_CONTEXT)).get("env_vars") or {}
    end, _ = fork(line, environment, [0, 1, 2], os.getcwd())
    for stream in range(3):
        os.close(stream)
    os._exit(exit_code(end) & 0xFF)


if __name__ == "__main__":
    main()
