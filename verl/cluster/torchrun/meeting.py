"""Rendezvous of the ranks of a torchrun job; reports which are missing."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from verl.errors import ClusterError, ConfigError

logger = logging.getLogger(__name__)

#: Seconds until it is said who is waited for, and between two looks.
PATIENCE, _LOOK = 5.0, 0.05
#: Seconds in which all ranks that waited for the same one have given up.
_GRACE = 2.0
_HOW = "start all ranks with torchrun; of a run in one process, RANK and WORLD_SIZE are left over: unset them"


def meet(rank: int, size: int, timeout: float) -> Store:
    """Connect to the store at `MASTER_ADDR` and `MASTER_PORT`, and wait for all ranks; after `PATIENCE` seconds a
    warning names the missing ones. (Torch's own wait would block all other threads.)

    Raises:
        ConfigError: RANK and WORLD_SIZE are set without the address, or contradict each other.
        ClusterError: a rank did not connect within `timeout` seconds, or the port is in use.
    """
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        what = f"RANK={rank} and WORLD_SIZE={size} are set, but {error} is not a place to meet"
        raise ConfigError(f"{what}: {_HOW}") from None
    if not 0 <= rank < size:
        raise ConfigError(f"RANK={rank} is not below WORLD_SIZE={size}: {_HOW}")
    who, began, has_warned = f"rank {rank} of {size}", time.monotonic(), False

    def wait_for(away: list[int]) -> None:
        """Wait a moment for the ranks that are away; warn, or give up."""
        nonlocal has_warned
        waited = time.monotonic() - began
        ranks = ", ".join(map(str, away[:16])) + (f" and {len(away) - 16} others" if len(away) > 16 else "")
        if waited > timeout:
            raise ClusterError(f"{who} waited {timeout:g} s at {host}:{port} for rank {ranks}, in vain: {_HOW}")
        if waited > PATIENCE and not has_warned:
            has_warned = True
            logger.warning("%s waits at %s:%d for rank %s: %s", who, host, port, ranks, _HOW)
        time.sleep(_LOOK)

    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    while not is_host and not _listens(host, port):
        wait_for([0])
    try:
        wait = timedelta(seconds=timeout)
        store: Store = TCPStore(host, port, size, is_host, wait, wait_for_workers=False, multi_tenant=True)
    except (DistError, RuntimeError) as error:
        what = f"{who} cannot {'listen' if is_host else 'meet rank 0'} at {host}:{port}"
        raise ClusterError(f"{what} ({error}): {_HOW}") from error
    store = PrefixStore(f"verl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    store.set(f"come/{rank}", "")
    away = list(range(size))
    while away := [other for other in away if not store.check([f"come/{other}"])]:
        wait_for(away)
    return store


@contextmanager
def joining(store: Store, rank: int, size: int, what: str) -> Iterator[None]:
    """Inside, all ranks make something together. If that fails, a `ClusterError` names those that did not even wait."""
    try:
        yield
    except (DistError, RuntimeError) as error:
        store.set(f"waited/{what}/{rank}", "")
        time.sleep(_GRACE)
        away = [f"rank {other} of {size}" for other in range(size) if not store.check([f"waited/{what}/{other}"])]
        names = ", ".join(away) or "each other"
        raise ClusterError(f"rank {rank} of {size} waited in vain for {names} to join {what}: {error}") from error


def _listens(host: str, port: int) -> bool:
    """Whether somebody does there; of a store that nobody is at, torch writes stacks to stderr."""
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True
