"""The base of pool workers: takes over the driver's environment, and ends its child processes when it ends."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

#: What makes a process a rank of a torchrun job; a worker is none, though the driver may be one.
_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class PooledWorker:
    """A Ray actor of a `Pool`."""

    def start(self, name: str, env: Mapping[str, str], path: Sequence[str], folder: str) -> tuple[str, str, int]:
        """Become worker `name`.

        Args:
            env, path: the driver's environment and import path.
            folder: the driver's working directory; "": stay here.

        Returns:
            Host, node (Ray's name of it) and process id.
        """
        import ray

        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's own: one
        os.environ |= env
        for variable in _RANK:
            os.environ.pop(variable, None)
        sys.path += [entry for entry in path if entry not in sys.path]
        if folder:
            os.chdir(folder)
        faulthandler.enable()  # a crash writes the stacks to stderr, which Ray copies to the driver's
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # the driver wants the stacks when it waits too long
        host = socket.gethostname()
        logging.basicConfig(format=f"{name} on {host}: %(levelname)s %(name)s: %(message)s", force=True)
        _end_together()
        return host, ray.get_runtime_context().get_node_id(), os.getpid()


def _end_together() -> None:
    """Have this process's group killed when this process ends, however it ends.

    A process outside of the group, and no child of this one (Ray kills children first), waits for the end of a pipe
    that only this process holds open.
    """
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    read, _write = os.pipe()  # which is never closed
    wait = f"exec 3<&0; {{ read line <&3; kill -9 -{os.getpid()}; }} >/dev/null 2>&1 &"
    subprocess.run(["sh", "-c", wait], stdin=read, start_new_session=True, check=True, timeout=60)
    os.close(read)
