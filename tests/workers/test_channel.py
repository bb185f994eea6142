"""What goes through a channel, and what is left of it."""

from __future__ import annotations

import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from verl.workers.channel import Channel


@pytest.mark.parametrize("transport", ["queue", "shared_memory"])
def test_messages_arrive_whole_and_in_order(transport: str) -> None:
    ours, theirs = (Channel(Connection(end.detach()), transport) for end in socket.socketpair())
    for kind, data, head in [("a", b"", {}), ("weights", b"x" * 50_000, {"version": 3}), ("b", b"y", {"name": "é"})]:
        ours.send(kind, data, **head)
        message = theirs.receive()
        assert (message.kind, bytes(message.data), message.head) == (kind, data, head)
    ours.send("last", b"z")
    ours.close()
    assert bytes(theirs.receive().data) == b"z"
    with pytest.raises(EOFError):
        theirs.receive()


def test_a_sender_that_is_killed_leaves_no_memory(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, signal, socket, sys\n"
        "from multiprocessing.connection import Connection\n"
        "from verl.workers import channel\n"
        "channel._SHARED_MEMORY = pathlib.Path(sys.argv[1])\n"
        "ours, theirs = socket.socketpair()\n"
        "channel.Channel(Connection(ours.detach())).send('weights', bytes(1 << 20))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60)
    assert done.returncode == -9 and list(tmp_path.iterdir()) == []
