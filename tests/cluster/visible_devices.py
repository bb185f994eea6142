"""A driver on a machine with four GPUs, of which it uses some. Prints what each worker sees.

The GPUs are made up: the driver's count of them is replaced, all else is Ray's own.
"""

from __future__ import annotations

import json
import os
from functools import partial
from typing import Any

import torch
from ray._private.accelerators import NvidiaGPUAcceleratorManager

from verl._host import device
from verl.cluster.controller import Controller
from verl.cluster.ray.pool import Pool, Worker, close_all
from verl.errors import ClusterError
from verl.workers.pooled import PooledWorker

NAME = "CUDA_VISIBLE_DEVICES"


class Looker(PooledWorker):
    """A worker that says what it sees."""

    def look(self) -> tuple[str | None, str | None]:
        return os.environ.get(NAME), os.environ.get("OF_THE_DRIVER")


class Lookers(Pool):
    """Workers with a GPU each."""

    role = "looker"
    worker_class = Looker
    error_class = ClusterError
    gpus = 1

    def _begin(self, worker: Worker) -> None:
        self._call(worker, "look", Looker.look)


class Accelerators:
    """`torch.accelerator` of that machine; the driver holds a tensor on number 2."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 4

    def current_accelerator(self) -> Any:
        return torch.device("cuda")

    def memory_reserved(self, name: str) -> int:
        return int(name == "cuda:2")


def main() -> None:
    before = os.environ[NAME]
    device._accelerators = Accelerators
    device.initialize = lambda: None  # of CUDA, which is not there
    NvidiaGPUAcceleratorManager.get_current_node_num_accelerators = staticmethod(lambda: 4)  # type: ignore[method-assign]
    Controller().group("actor", partial(object))
    pool = Lookers(2)
    pool.scale(2)
    seen = []
    while len(seen) < pool.size:
        _, name, answer = pool.events.get(timeout=200)
        if isinstance(answer, Exception):
            raise answer
        if name == "look":
            seen.append(answer)
    assert os.environ[NAME] == before
    print(json.dumps(sorted(seen)))
    close_all()


if __name__ == "__main__":
    main()
