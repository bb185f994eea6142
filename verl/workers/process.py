"""A worker process: told everything by messages of the one that started it, and ended when that one ends.

    python -m verl.workers.process MODULE:CLASS NAME ADDRESS TRANSPORT

Its first message is "hello" (its host), its last, if it fails, "failed" (the traceback). Between these are the
messages of the class; "stop" ends it.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn, Protocol

from verl.workers.channel import Channel, Message, connect

#: The environment variable by which a worker learns the token of a TCP connection.
TOKEN = "VERL_WORKER_TOKEN"


class Server(Protocol):
    """What a worker process does. It is made with a function `send(kind, data, **head)`, and has a method `on_KIND`
    for each kind of message. While `is_busy`, `step` is called between messages."""

    @property
    def is_busy(self) -> bool: ...

    def step(self) -> None: ...


def main(target: str, name: str, address: str, transport: str) -> None:
    # The one that started it asks for stacks when it waits too long.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the other's to answer
    host = socket.gethostname()
    logging.basicConfig(format=f"{name} on {host}: %(levelname)s %(name)s: %(message)s")
    channel = Channel(connect(address, os.environ.pop(TOKEN, "")), transport)
    try:
        channel.send("hello", host=host)
        module, _, kind = target.partition(":")
        make: Callable[..., Server] = getattr(importlib.import_module(module), kind)
        serve(make(channel.send), channel)
    except (BrokenPipeError, ConnectionResetError):
        _end()
    except Exception:
        channel.send("failed", text=traceback.format_exc())
        raise


def serve(server: Server, channel: Channel) -> None:
    """Work until told to stop."""
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, inbox), daemon=True).start()
    while True:
        try:
            message = inbox.get(block=not server.is_busy)
        except queue.Empty:
            server.step()
            continue
        if message.kind == "stop":
            return
        getattr(server, f"on_{message.kind}")(message)


def _listen(channel: Channel, inbox: queue.SimpleQueue[Message]) -> None:
    try:
        while True:
            inbox.put(channel.receive())
    except (EOFError, OSError):
        _end()


def _end() -> NoReturn:
    """Whoever asked is gone, so what is still being done is for nobody, here and in what was started from here."""
    if os.getsid(0) == os.getpid():  # on Ray the session is not ours
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
