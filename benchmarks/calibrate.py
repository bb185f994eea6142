"""What this machine reaches: a short measurement of products, memory and a collective (seconds).

    python benchmarks/calibrate.py

Prints the rates and, of a device whose data sheet the planner has, the shares of it for `verl plan --efficiency`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from verl._host import device
from verl.errors import ClusterError
from verl.planner.hardware import Efficiency, sheet_of

#: Seconds that the ranks of the collective may take to start, and to finish.
DEADLINE = 120


@dataclass(frozen=True)
class Measured:
    """Rates that a device reached. `network` is None where there are not two devices, `host` (from the host's memory to
    the device's) on CPU."""

    kind: str
    flops: float
    bandwidth: float
    network: float | None
    host: float | None = None

    @property
    def efficiency(self) -> Efficiency | None:
        """As shares of the data sheet, a share that was not measured as usual; None: there is no data sheet."""
        sheet, usual = sheet_of(self.kind), Efficiency()
        if sheet is None:
            return None
        network = usual.network if self.network is None else min(1.0, self.network / sheet.link)
        return Efficiency(min(1.0, self.flops / sheet.flops), min(1.0, self.bandwidth / sheet.bandwidth), network)


def measure(megabytes: int = 32) -> Measured:
    """Measure what runs take by default: this machine's first accelerator, else its CPU (seconds).

    Args:
        megabytes: size of what is gathered over two ranks, and copied (on an accelerator 16 times as much).

    Raises:
        ClusterError: the ranks of the collective do not answer within the deadline.
    """
    kind = device.default_kind()
    is_cpu = kind == "cpu"
    where = torch.device("cpu") if is_cpu else torch.device(kind, 0)
    dtype = torch.float32 if is_cpu else torch.bfloat16
    rows, width, inner = (512, 1024, 1024) if is_cpu else (8192, 8192, 8192)
    x, w = torch.randn(rows, width, device=where, dtype=dtype), torch.randn(inner, width, device=where, dtype=dtype)
    product = _seconds(lambda: torch.nn.functional.linear(x, w))
    source = torch.randn(megabytes * (1 << 18) * (1 if is_cpu else 16), device=where)
    target = torch.empty_like(source)
    copy = _seconds(lambda: target.copy_(source))
    count = 2 if is_cpu else device.count(kind)
    return Measured(
        device.device_name(str(where)),
        2 * rows * width * inner / product,
        2 * source.nbytes / copy,
        _collective(megabytes, kind) if count > 1 else None,
        None if is_cpu else _from_host(megabytes, where),
    )


def _from_host(megabytes: int, where: torch.device) -> float:
    """Bytes/s of a copy to the device."""
    source = torch.ones(megabytes << 18).pin_memory()
    target = torch.empty_like(source, device=where)
    return source.nbytes / _seconds(lambda: target.copy_(source, non_blocking=True))


def _seconds(run: Callable[[], object], times: int = 7) -> float:
    """The median of several runs after a first one."""
    found = []
    for _ in range(times + 1):
        begun = time.perf_counter()
        run()
        device.synchronize()
        found.append(time.perf_counter() - begun)
    return sorted(found[1:])[times // 2]


def _collective(megabytes: int, kind: str) -> float:
    """Bytes/s of an all-gather between two ranks, each a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        line = [sys.executable, __file__, directory, str(megabytes), kind]
        ranks = [subprocess.Popen([*line, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
        try:
            answers = [rank.communicate(timeout=DEADLINE)[0] for rank in ranks]
        except subprocess.TimeoutExpired:
            raise ClusterError(f"two ranks did not gather {megabytes} MB within {DEADLINE} s") from None
        finally:
            for rank in ranks:
                rank.kill()
    if any(rank.returncode for rank in ranks):
        raise ClusterError("a rank of the measured collective failed; its error is above")
    return float(answers[0])


def _rank(directory: str, megabytes: int, kind: str, rank: int) -> None:
    """One of two ranks; the first prints bytes/s."""
    if kind != "cpu":
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(
        dist.get_default_backend_for_device(kind),  # of GPUs their own, so that their links are measured
        init_method=f"file://{Path(directory) / 'store'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=DEADLINE),
    )
    where = torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)
    piece = torch.ones(megabytes << 17, device=where)
    whole = [torch.empty_like(piece) for _ in range(2)]
    seconds = _seconds(lambda: dist.all_gather(whole, piece))
    dist.destroy_process_group()
    if rank == 0:
        print(piece.nbytes / seconds)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _rank(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        print(measured := measure())
        if (shares := measured.efficiency) is not None:
            print(f"--efficiency {shares.compute:.2f},{shares.memory:.2f},{shares.network:.2f}")
