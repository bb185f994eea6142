"""Devices by their data sheets, clusters of them, and how long a collective takes.

Units are bytes, seconds and FLOP/s; the rate of a link is counted in one direction.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from verl._base.checked import checked
from verl._base.record import Portion
from verl.errors import ConfigError, nearest
from verl.models.memory import HeadSizes

GB = 1e9
#: Seconds of one hop of a collective beside its bytes: within a machine, between machines.
HOP = (4e-6, 15e-6)


@dataclass(frozen=True)
class Device:
    """A row of a data sheet.

    Attributes:
        flops: dense FLOP/s in bf16.
        memory: bytes.
        bandwidth: of that memory.
        link: to the other devices of a machine (NVLink, else PCIe).
        network: between machines, as the vendor's own machine of 8 has it, per device.
        host: to the host's memory.
    """

    name: str
    flops: float
    memory: float
    bandwidth: float
    link: float
    network: float
    host: float = 32 * GB

    @property
    def head(self) -> HeadSizes:
        """How much of a model's head is computed at a time there."""
        return HeadSizes.of(None if self.name == "cpu" else self.memory)


DEVICES = {
    device.name.lower(): device
    for device in (
        Device("A100", 312e12, 80 * GB, 2039 * GB, 300 * GB, 25 * GB),
        Device("A100-40", 312e12, 40 * GB, 1555 * GB, 300 * GB, 25 * GB),
        Device("H100", 989e12, 80 * GB, 3350 * GB, 450 * GB, 50 * GB, 64 * GB),
        Device("H200", 989e12, 141 * GB, 4800 * GB, 450 * GB, 50 * GB, 64 * GB),
        Device("H20", 148e12, 96 * GB, 4000 * GB, 450 * GB, 50 * GB, 64 * GB),
        Device("B200", 2250e12, 180 * GB, 8000 * GB, 900 * GB, 50 * GB, 64 * GB),
        Device("L4", 121e12, 24 * GB, 300 * GB, 32 * GB, 3.125 * GB),
        Device("L40S", 362e12, 48 * GB, 864 * GB, 32 * GB, 12.5 * GB),
        Device("A10G", 70e12, 24 * GB, 600 * GB, 32 * GB, 3.125 * GB),
        Device("RTX4090", 165e12, 24 * GB, 1008 * GB, 32 * GB, 3.125 * GB),
    )
}


#: One rank of a CPU: round numbers of a small server.
CPU = Device("cpu", 200 * GB, 16 * GB, 20 * GB, 2 * GB, GB, 20 * GB)


def sheet_of(name: str) -> Device | None:
    """The data sheet of a device by the name that its driver gives it, such as "NVIDIA A100-SXM4-40GB"."""
    words = name.lower().replace("-", " ").split()
    kind = next((key for key in sorted(DEVICES, key=len, reverse=True) if key in words), None)
    if kind is None:
        return None
    sizes = (word.removesuffix("gb") for word in words if re.fullmatch(r"\d+gb", word))
    return next((DEVICES[key] for size in sizes if (key := f"{kind}-{size}") in DEVICES), DEVICES[kind])


@checked
@dataclass(frozen=True)
class Efficiency:
    """Shares of the data sheets that are reached: of matrix products, of memory bandwidth, of links and network.

    The defaults were fitted to the paper's results on 64 GPUs (docs/planner.md); `benchmarks/calibrate.py` measures
    them.
    """

    compute: Portion = 0.5
    memory: Portion = 0.6
    network: Portion = 0.5


@dataclass(frozen=True)
class Cluster:
    """Machines of equal devices. `network`: bytes/s of a machine, which its devices share."""

    machines: int
    per_machine: int
    device: Device
    network: float
    efficiency: Efficiency = Efficiency()

    @classmethod
    @checked
    def parse(
        cls,
        text: str,
        network_gbps: float | None = None,
        efficiency: Efficiency | None = None,
        option: str = "--cluster",
    ) -> Cluster:
        """From "16x8xA100" (machines x devices x kind), "4xL4" (one machine) or "1xH100-80GB" (with its memory).

        Args:
            network_gbps: Gbit/s between machines, per machine (None: as the vendor's machines have it).
            option: what messages call the text.

        Raises:
            ConfigError: it is no cluster, or the kind is unknown.
        """
        match = re.fullmatch(r"(?:(\d+)x)?(\d+)x(([A-Za-z][\w.-]*?)(?:-(\d+)(?:[gG][bB])?)?)", text.strip())
        if match is None:
            raise ConfigError(f"{option}: '{text}' is no cluster: write MACHINESxDEVICESxKIND, such as 16x8xA100")
        name, kind, memory = match[3], match[4].lower(), match[5]
        device = DEVICES.get(f"{kind}-{memory}", DEVICES.get(kind))
        if device is None:
            raise ConfigError(f"{option}: no data sheet of '{name}': {nearest(name.lower(), DEVICES)}")
        if memory:
            device = replace(device, name=name.upper(), memory=int(memory) * GB)
        machines, per_machine = int(match[1] or 1), int(match[2])
        if not 1 <= machines * per_machine <= 1 << 14:
            raise ConfigError(f"{option}: '{text}' needs 1 to 16384 devices")
        if network_gbps is not None and not 0 < network_gbps <= 1e9:
            raise ConfigError(f"--network: Gbit/s of a machine are above 0, not {network_gbps:g}")
        network = device.network * per_machine if network_gbps is None else network_gbps * GB / 8
        return cls(machines, per_machine, device, network, efficiency or Efficiency())

    @property
    def size(self) -> int:
        return self.machines * self.per_machine

    def resized(self, size: int) -> Cluster:
        """`size` devices of the same kind, in machines of the same size."""
        return replace(self, machines=math.ceil(size / self.per_machine), per_machine=min(size, self.per_machine))

    def __str__(self) -> str:
        between = f", {self.network * 8 / GB:g} Gbit/s between machines" if self.machines > 1 else ""
        return f"{self.machines} x {self.per_machine} {self.device.name}{between}"

    def compute(self, flops: float) -> float:
        """Seconds of matrix products on one device."""
        return flops / (self.device.flops * self.efficiency.compute)

    def read(self, amount: float) -> float:
        """Seconds in which one device reads or writes `amount` bytes of its memory."""
        return amount / (self.device.bandwidth * self.efficiency.memory)

    def gather(self, amount: float, *dims: tuple[int, int]) -> float:
        """Seconds of an all-gather (or reduce-scatter) in a ring, while all groups of the same kind do the same.

        Args:
            amount: bytes that every rank has in the end.
            dims: (size, stride) of the group along each dimension of the layout, ranks of a machine being neighbours.
        """
        size, machines, groups = _shape(self.per_machine, dims)
        if size == 1:
            return 0.0
        inside = amount * (size - 1) / size / self.device.link
        between = groups * amount * (machines - 1) / machines / self.network
        return max(inside, between) / self.efficiency.network + HOP[machines > 1] * math.ceil(math.log2(size))

    def send(self, amount: float, stride: int) -> float:
        """Seconds in which every rank passes `amount` bytes to the one `stride` ranks on."""
        rate = self.device.link if stride < self.per_machine else self.network / self.per_machine
        return amount / (rate * self.efficiency.network) + HOP[stride >= self.per_machine]


@cache
def _shape(per_machine: int, dims: tuple[tuple[int, int], ...]) -> tuple[int, int, float]:
    """The ranks of a group, its machines, and the groups that share the network of each machine."""
    ranks = [sum(steps) for steps in product(*(range(0, size * stride, stride) for size, stride in dims if size > 1))]
    machines = len({rank // per_machine for rank in ranks})
    return len(ranks), machines, per_machine * machines / len(ranks)
