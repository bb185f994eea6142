"""Two nodes on one machine: network namespaces, joined by one cable, each with a loopback, an address and a directory
of Ray of its own. It takes root, and the `ip` of iproute2."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.leaks import mounts
from tests.ranks import ENV

#: The interface of each node.
_CABLE = "verl0"
#: Seconds for one command about namespaces.
_SOON = 30
#: Where `ip` keeps the network namespaces that have a name.
NAMESPACES = Path("/run/netns")
#: Where Ray notes which node a machine is: in a namespace of files of its own, a directory of the node's.
_OWN_RAY = 'mkdir -p /tmp/ray && mount --bind "$1" /tmp/ray && shift && exec "$@"'


class Node:
    """A node and the processes that are started on it, which end with it.

    Attributes:
        address: of the node, for the other one.
    """

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name, self.address, self._folder = name, address, folder
        folder.mkdir(parents=True)

    def start(self, *command: str | Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Begin a command; gloo is told which interface to use."""
        line = ["ip", "netns", "exec", self.name, "sh", "-c", _OWN_RAY, "sh", str(self._folder), *map(str, command)]
        environment = {**ENV, "GLOO_SOCKET_IFNAME": _CABLE, "RAY_TMPDIR": "/tmp", **(env or {})}
        return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@contextmanager
def two_nodes(folder: Path) -> Iterator[tuple[Node, Node]]:
    """Two nodes that reach each other and nothing else. Whatever happens, namespaces and processes in them are gone
    afterwards. Where they cannot be made, the test is skipped with the reason.

    Args:
        folder: for files of the nodes; its path should be short, Ray makes sockets in it.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("SKIPPED, two nodes were not tried: network namespaces take root and the `ip` of iproute2")
    base = f"verl{os.getpid()}"
    nodes = [Node(f"{base}{end}", f"10.77.0.{number}", folder / end) for number, end in enumerate("ab", 1)]
    try:
        try:
            _make(nodes)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"SKIPPED, two nodes were not tried: {error.stderr.strip()}")
        yield nodes[0], nodes[1]
    finally:
        for node in nodes:
            _end(node)
        # `ip netns add` mounts this folder over itself, once a machine. The last nodes in it take that back.
        if str(NAMESPACES) in mounts() and not any(NAMESPACES.iterdir()):
            subprocess.run(["umount", NAMESPACES], capture_output=True, timeout=_SOON, check=False)


def _make(nodes: list[Node]) -> None:
    for node in nodes:
        _ip("netns", "add", node.name)
    ends = [f"{node.name}v" for node in nodes]  # at most 15 characters
    _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for node, end in zip(nodes, ends, strict=True):
        _ip("link", "set", end, "netns", node.name, "name", _CABLE)
        _ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", _CABLE)
        for interface in (_CABLE, "lo"):
            _ip("-n", node.name, "link", "set", interface, "up")
        _ip("-n", node.name, "route", "add", "default", "dev", _CABLE)  # Ray finds its address by way of it


def _end(node: Node) -> None:
    """SIGKILL to what runs in the namespace, then the namespace; nothing if it was never made."""
    found = subprocess.run(
        ["ip", "netns", "pids", node.name], capture_output=True, text=True, timeout=_SOON, check=False
    )
    for pid in map(int, found.stdout.split()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    subprocess.run(["ip", "netns", "delete", node.name], capture_output=True, timeout=_SOON, check=False)


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], capture_output=True, text=True, timeout=_SOON, check=True)
