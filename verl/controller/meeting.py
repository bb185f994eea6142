"""Where the ranks of a torchrun job meet, and who has not come."""

from __future__ import annotations

import logging
import os
import socket
import time
from datetime import timedelta
from typing import NoReturn

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from verl.errors import ClusterError, ConfigError

logger = logging.getLogger(__name__)

#: Seconds until it is said who is waited for, and between two looks.
PATIENCE, _LOOK = 5.0, 0.05
_HOW = "start all ranks with torchrun; of a run in one process, RANK and WORLD_SIZE are left over: unset them"


def meet(rank: int, size: int, timeout: float) -> Store:
    """The store of all ranks, where `MASTER_ADDR` and `MASTER_PORT` say, once all of them have come to it; after
    `PATIENCE` seconds a warning says who has not.

    Raises:
        ConfigError: the environment has RANK and WORLD_SIZE, but not where to meet, or they contradict each other.
        ClusterError: others did not come within `timeout` seconds, or the place is taken.
    """
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"RANK={rank} and WORLD_SIZE={size} are set, but {error} is not a place to meet: {_HOW}"
        ) from None
    if not 0 <= rank < size:
        raise ConfigError(f"RANK={rank} is not below WORLD_SIZE={size}: {_HOW}")
    return _Meeting(rank, size, f"{host}:{port}", timeout).all_come(host, port)


class _Meeting:
    def __init__(self, rank: int, size: int, place: str, timeout: float) -> None:
        self.rank, self.size, self.place, self.timeout = rank, size, place, timeout
        self.began, self.has_warned = time.monotonic(), False

    def all_come(self, host: str, port: int) -> Store:
        """Torch would wait within a call that lets no other thread run, and does not say for whom."""
        store = PrefixStore(f"verl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", self._open(host, port))
        store.set(f"come/{self.rank}", "")
        away = list(range(self.size))
        while away := [rank for rank in away if not store.check([f"come/{rank}"])]:
            self._wait(away)
        return store

    def _open(self, host: str, port: int) -> Store:
        hosts = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        wait = timedelta(seconds=self.timeout)
        while not hosts and not _listens(host, port):
            self._wait([0])
        try:
            return TCPStore(host, port, self.size, hosts, wait, wait_for_workers=False, multi_tenant=True)
        except (DistError, RuntimeError) as error:
            what = "listen" if hosts else "meet rank 0"
            raise ClusterError(f"{self._who()} cannot {what} at {self.place} ({error}): {_HOW}") from error

    def _wait(self, away: list[int]) -> None:
        waited = time.monotonic() - self.began
        if waited > self.timeout:
            self._give_up(away)
        if waited > PATIENCE and not self.has_warned:
            self.has_warned = True
            logger.warning("%s waits at %s for rank %s: %s", self._who(), self.place, _listed(away), _HOW)
        time.sleep(_LOOK)

    def _give_up(self, away: list[int]) -> NoReturn:
        raise ClusterError(
            f"{self._who()} waited {self.timeout:g} s at {self.place} for rank {_listed(away)}, in vain: {_HOW}"
        )

    def _who(self) -> str:
        return f"rank {self.rank} of {self.size}"


def _listens(host: str, port: int) -> bool:
    """Whether somebody does there; of a store that nobody is at, torch writes stacks to stderr."""
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} others" if len(ranks) > 16 else "")
