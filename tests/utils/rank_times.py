"""A rank whose collectives are timed, and compared with the other's. Argument: the file that both write to."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from verl.errors import ClusterError
from verl.utils.communication import collective_times
from verl.utils.debugging import check_same

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()
    with collective_times() as times:
        time.sleep(1.5 * rank)
        for _ in range(3):
            dist.all_reduce(torch.ones(1000))
        dist.broadcast(torch.ones(10), 0)
    check_same("same", torch.arange(5))
    check_same("text", "same")
    try:
        check_same("weights", torch.tensor([float(rank)]))
        difference = ""
    except ClusterError as error:
        difference = str(error)
    told = {name: (entry.calls, entry.seconds, entry.elements) for name, entry in times.items()}
    Path(f"{sys.argv[1]}-{rank}").write_text(json.dumps([told, difference]))
    dist.destroy_process_group()
