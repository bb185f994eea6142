"""A connection from each rank to rank 0, that breaks when that process is gone."""

from __future__ import annotations

import os
import socket
from typing import Any

from verl.controller.ranks import is_main, torchrun_ranks, who
from verl.errors import ClusterError

_PORT = "verl/lifeline"


class Lifeline:
    """A collective that a dead rank belongs to breaks by itself; a wait for a key of the job's store does not, for the
    store is kept by torchrun's agent, which lives on. Whoever waits for a key of rank 0 looks here meanwhile.

    Made on all ranks together.

    Args:
        store: the job's key-value store.
        timeout: seconds to wait for the connection.

    Raises:
        ClusterError: rank 0 cannot be reached.
    """

    def __init__(self, store: Any, timeout: float) -> None:
        if is_main():
            # Nobody accepts: the kernel connects whoever comes, and resets all when this process ends.
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            self._socket = socket.create_server(("", 0), family=family, backlog=torchrun_ranks(), dualstack_ipv6=both)
            store.set(_PORT, str(self._socket.getsockname()[1]))
        else:
            address = os.environ["MASTER_ADDR"], int(store.get(_PORT))
            try:
                self._socket = socket.create_connection(address, timeout)
            except OSError as error:
                raise ClusterError(f"{who()}: cannot reach rank 0 at {address[0]}:{address[1]}: {error}") from error
            self._socket.setblocking(False)

    @property
    def is_broken(self) -> bool:
        """Whether rank 0 is gone; asked on another rank."""
        try:
            return not self._socket.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True
