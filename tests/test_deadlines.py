"""What waits for a socket, a pipe or a process has a deadline, also where a thread does the waiting.

The package's source is searched for every such function, whether it is called or handed to a thread
(`asyncio.to_thread`, `run_in_executor`, `Thread(target=...)`), and each has an entry here: what in its file bounds it.
"""

from __future__ import annotations

import ast

import pytest

from tests.package import modules
from tests.test_safety import suspects

#: Ends of the full names of functions that wait for another process.
WAITS = (
    *("accept", "recv", "recv_into", "recvfrom", "recvfrom_into", "recvmsg", "recvmsg_into", "recv_fds", "recv_bytes"),
    *("connect", "create_connection", "sendall", "sendfile", "getaddrinfo", "gethostbyname", "waitpid", "waitid"),
)
#: What bounds each wait: a text of its file.
BOUNDED = {
    ("cluster/torchrun/link.py", "receive", "recv"): "return dist.ProcessGroupGloo(store, rank, size, silence)",
    ("cluster/torchrun/link.py", "_bytes", "recv"): "return dist.ProcessGroupGloo(store, rank, size, silence)",
    ("cluster/torchrun/meeting.py", "_listens", "create_connection"): "create_connection((host, port), 1.0)",
    ("rollout/gateway/agents.py", "_in_sandbox", "recv_fds"): "ours.settimeout(self._limits.seconds)",
    # Of a process that is killed when a call is late: then its pipe ends.
    ("rewards/processes.py", "_read", "recv_bytes"): "os.killpg(self.pid, signal.SIGKILL)",
    ("rewards/processes.py", "_read", "waitpid"): "os.killpg(self.pid, signal.SIGKILL)",
    ("rewards/processes.py", "_serve", "recv_bytes"): "die_with_parent(parent)",
    ("rewards/processes.py", "_serve_async", "recv_bytes"): "die_with_parent(parent)",
    ("sandbox/jail.py", "main", "waitpid"): "os.kill(init, signal.SIGKILL)",
    ("sandbox/jail.py", "oversee", "waitpid"): "os.waitpid(-1, os.WNOHANG)",
}
#: What waits for nobody, or not without end by itself, and why.
OTHERS = {
    ("cli/doctor.py", "check_host", "getaddrinfo"): "the system's resolver has deadlines of its own",
    ("cluster/ray/transport.py", "__init__", "connect"): "verl._host.ray_session.connect",
    ("cluster/ray/pool.py", "_start", "connect"): "verl._host.ray_session.connect",
    ("data/buffers.py", "__init__", "connect"): "verl._host.ray_session.connect",
    ("roles/standalone.py", "__init__", "connect"): "verl._host.ray_session.connect",
    ("rollout/constrained.py", "__post_init__", "accept"): "the user's function",
    ("rollout/constrained.py", "__call__", "accept"): "the user's function",
    ("trainer/asynchronous.py", "_feed", "accept"): "of a schedule, which waits for nothing",
}


def test_each_wait_for_another_process_is_bounded() -> None:
    waits = {(where, *wait) for where, (_, tree) in modules().items() for wait in suspects(tree, WAITS)}
    assert waits == BOUNDED.keys() | OTHERS.keys()
    assert [place for place, bound in BOUNDED.items() if bound not in modules()[place[0]][0]] == []


@pytest.mark.parametrize(
    "line",
    [
        "import asyncio, socket; asyncio.to_thread(socket.recv_fds, link, 1, 1)",
        "import threading; threading.Thread(target=server.accept, daemon=True).start()",
        "loop.run_in_executor(None, link.recv, 4)",
        "from functools import partial; pool.submit(partial(link.connect, address))",
        "from socket import create_connection as dial; beside(dial, address)",
        "link.sendall(x)",
    ],
)
def test_the_search_finds_waits_that_are_handed_on(line: str) -> None:
    assert suspects(ast.parse(line), WAITS)
