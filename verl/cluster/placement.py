"""The placement maps the ranks of each role to devices. It is parsed from every form a user may write.

Each device is for one rank: "cuda:3", or with the same meaning "cpu:3" (a process on CPU). Roles that share devices are
colocated, roles with devices of their own run apart; nothing else decides it. Under torchrun device number i is rank i.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl._base.checked import checked, hinted
from verl._base.names import check_known
from verl._host.device import default_kind
from verl.errors import ConfigError, nearest, shown
from verl.weights.layout import PARALLEL

ROLES = ("actor", "rollout", "critic", "cost_critic", "reference", "reward", "cost")
_KEYS = ("devices", "device", "gpu_ids", "cpu_ids", "parallel", "node", "accelerator")
# As it is written -> as torch calls it: AMD's GPUs are "cuda" there, too.
_KINDS = {"cuda": "cuda", "gpu": "cuda", "rocm": "cuda", "cpu": "cpu", "mps": "mps"}
#: Ranks of the largest job: a bound for what is written, not for what is there.
MOST_RANKS = 1 << 14
_RANGE = re.compile(r"([a-z]+)(?::(\d[\d,\s-]*))?")


@dataclass(frozen=True, order=True)
class Device:
    """One rank's place; on a Ray cluster `node` and `accelerator` may say where."""

    kind: str
    index: int
    node: str = ""
    accelerator: str = ""

    def __str__(self) -> str:
        node, accelerator = f"@{self.node}" if self.node else "", f" ({self.accelerator})" if self.accelerator else ""
        return f"{self.kind}:{self.index}{node}{accelerator}"


@dataclass(frozen=True)
class ResourcePool:
    """The devices of a role.

    Args:
        devices: "cuda:0-3", "cpu:0,2", "cuda:4", or a list of such.
        parallel: how the role's ranks share its model: "data" (as its settings say), "tensor", "pipeline", "sequence"
            or "expert".

    Raises:
        ConfigError: it cannot be read, or names a device twice.
    """

    devices: tuple[Device, ...]
    parallel: str = "data"

    @checked
    def __init__(self, devices: str | Device | Iterable[str | Device], parallel: str = "data") -> None:
        parts = [devices] if isinstance(devices, str | Device) else devices
        pool = [device for part in parts for device in _devices(part)]
        if not pool:
            raise ConfigError("placement: a pool needs at least one device, such as 'cuda:0' or 'cpu:0'")
        _check_count(len(pool), "a pool")
        device, times = Counter(pool).most_common(1)[0]
        if times > 1:
            raise ConfigError(f"placement: device {device} is named twice in one pool")
        if len({device.kind for device in pool}) > 1:
            raise ConfigError(f"placement: one pool is of one kind of device, got {', '.join(map(str, pool))}")
        if parallel not in PARALLEL:
            raise ConfigError(f"placement: there is no parallel='{parallel}': {nearest(str(parallel), PARALLEL)}")
        object.__setattr__(self, "devices", tuple(sorted(pool)))
        object.__setattr__(self, "parallel", parallel)

    def __len__(self) -> int:
        return len(self.devices)

    def __str__(self) -> str:
        return ", ".join(map(str, self.devices))

    @classmethod
    def numbered(cls, first: int, count: int) -> ResourcePool:
        """So many devices from number `first` on, on the accelerator where there is one, else on the CPU."""
        if count < 1:
            raise ConfigError(f"placement: a pool needs at least one device, not {count}")
        _check_count(count, "a pool")
        return cls([Device(default_kind(), index) for index in range(first, first + count)])

    @classmethod
    def parse(cls, form: Any) -> ResourcePool:
        """From any form: a pool, "cuda:0-3", `{"gpu_ids": [0, 1], "parallel": "data"}`, `{"device": "cuda:4"}`.

        On a Ray cluster such a mapping may also have "node" (name, address, or number, the head being 0; its devices
        are counted by themselves) and "accelerator" (a type, such as "H100").
        """
        if isinstance(form, ResourcePool):
            return form
        if not isinstance(form, Mapping):
            if isinstance(form, str | Device | Sequence):
                return cls(form)
            raise ConfigError(f"placement: give devices such as 'cuda:0-3' or {{'gpu_ids': [0, 1]}}, not {shown(form)}")
        check_known("placement has no key", form, _KEYS)
        where = [key for key in _KEYS[:4] if form.get(key) is not None]
        if len(where) != 1:
            raise ConfigError(f"placement: give one of {', '.join(_KEYS[:4])}, got {', '.join(where) or 'none'}")
        value = form[where[0]]
        if where[0] in ("gpu_ids", "cpu_ids"):
            kind = "cuda" if where[0] == "gpu_ids" else "cpu"
            value = [Device(kind, index) for index in _numbers(where[0], value)]
        pool = cls(value, form.get("parallel") or "data")
        node, accelerator = (str("" if form.get(key) is None else form[key]) for key in ("node", "accelerator"))
        return cls([replace(device, node=node, accelerator=accelerator) for device in pool.devices], pool.parallel)


@hinted
@dataclass(frozen=True)
class DeviceMesh:
    """Roles mapped to devices: checked when it is made, printed as a table.

    >>> print(DeviceMesh({"actor": "cpu:0-1", "critic": "cpu:2"}))
            actor  critic
    cpu:0   0/2    ·
    cpu:1   1/2    ·
    cpu:2   ·      0/1

    Args:
        placement: role -> pool, in any form of `ResourcePool.parse`, or a number of devices, which are then the next
            free ones; a lone pool is the actor's. "rollout" is where the actor's generation runs, "reward" and
            "cost" where their models do: these run in the script's process if they are not named, other roles share the
            actor's devices. Pools may share devices.

    Raises:
        ConfigError: an unknown role, devices of several kinds, or the policy trains on some of the devices that it
            generates on.
    """

    pools: Mapping[str, ResourcePool] = field(default_factory=dict)

    def __init__(self, placement: Any) -> None:
        if isinstance(placement, DeviceMesh):
            placement = placement.pools
        is_map = isinstance(placement, Mapping) and not set(placement) & set(_KEYS)
        by_role = placement if is_map else {"actor": placement}
        if not by_role:
            raise ConfigError("placement: it is empty: name at least the actor's devices")
        pools: dict[str, ResourcePool] = {}
        free = 0  # the first device that no role before this one has taken
        for role, where in by_role.items():
            check_known("placement: there is no role", [role], ROLES)
            is_count = isinstance(where, int) and not isinstance(where, bool)
            pools[role] = ResourcePool.numbered(free, where) if is_count else ResourcePool.parse(where)
            free = max(free, pools[role].devices[-1].index + 1)
        object.__setattr__(self, "pools", pools)
        if len(kinds := {device.kind for device in self.devices}) > 1:
            raise ConfigError(f"placement: all devices are of one kind, got {' and '.join(sorted(kinds))}")
        if "actor" in pools and "rollout" in pools:
            trains, generates = pools["actor"], pools["rollout"]
            common = set(trains.devices) & set(generates.devices)
            if common and set(trains.devices) != set(generates.devices):
                raise ConfigError(
                    f"placement: the pools of 'actor' ({len(trains)} devices: {trains}) and 'rollout' "
                    f"({len(generates)} devices: {generates}) overlap in {len(common)}: the policy trains and "
                    "generates on the same devices, or on others"
                )

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices, each once, in order."""
        return tuple(sorted({device for pool in self.pools.values() for device in pool.devices}))

    def pool(self, role: str) -> ResourcePool:
        """A role's pool: its own, else the actor's, else the first."""
        return self.pools.get(role) or self.pools.get("actor") or next(iter(self.pools.values()))

    def check(self, available: Mapping[str, int], where: str) -> None:
        """Compare with what there is.

        Args:
            available: kind of device -> number of devices.
            where: what has them, for the message.

        Raises:
            ConfigError: devices are missing; names the role, what it asks for and what there is.
        """
        for role, pool in self.pools.items():
            for device in pool.devices:
                count = available.get(device.kind, 0)
                if device.index >= count:
                    raise ConfigError(
                        f"placement: role '{role}' asks for device {device} (of {pool}), and {where} has {count} "
                        f"{device.kind} devices{f' ({device.kind}:0-{count - 1})' if count > 1 else ''}"
                    )

    def picture(self, roles: Iterable[str]) -> str:
        """A table of the roles' ranks, with a row per device and a column per role."""
        pools = {role: self.pool(role) for role in roles}
        rows = [["", *pools]]
        for device in self.devices:
            cells = (
                f"{pool.devices.index(device)}/{len(pool)}" if device in pool.devices else "·"
                for pool in pools.values()
            )
            rows.append([str(device), *cells])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def __str__(self) -> str:
        return self.picture(self.pools)

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.pools.items(), key=lambda item: item[0])))


def _devices(written: str | Device) -> list[Device]:
    if isinstance(written, Device):
        return [replace(written, kind=_kind(written.kind, written))]
    match = _RANGE.fullmatch(str(written).strip().lower())
    if match is None:
        raise ConfigError(f"placement: '{written}' is no device: write 'cuda:0', 'cuda:0-3' or 'cpu:0,2'")
    kind, devices = _kind(match[1], written), []
    for part in (match[2] or "0").replace(" ", "").split(","):
        first, _, last = part.partition("-")
        if max(len(first), len(last)) > 9:
            raise ConfigError(f"placement: '{written[:40]}' has a number of a device that no machine has")
        if not first.isdigit() or (last and not last.isdigit()) or (last and int(last) < int(first)):
            raise ConfigError(f"placement: '{written}' is no range of devices: write '{kind}:0-3' or '{kind}:0,2'")
        _check_count(int(last or first) - int(first) + 1, f"'{written}'")
        devices += [Device(kind, i) for i in range(int(first), int(last or first) + 1)]
    if kind == "mps" and devices != [Device("mps", 0)]:
        raise ConfigError(f"placement: '{written}': a Mac has one device, 'mps:0'")
    return devices


def _check_count(count: int, what: str) -> None:
    """Refuse at once what no cluster has; a smaller number is compared with what there is at the start."""
    if count > MOST_RANKS:
        raise ConfigError(f"placement: {what} names {count} devices, and a job has at most {MOST_RANKS} ranks")


def _kind(name: str, written: str | Device) -> str:
    check_known(f"placement: '{written}': there is no kind of device", [name], _KINDS)
    return _KINDS[name]


def _numbers(key: str, written: Any) -> list[int]:
    """Numbers of devices, one or several."""
    numbers = list(written) if isinstance(written, list | tuple | range) else [written]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ConfigError(f"placement: {key} are numbers from 0 on, such as [0, 1], not {shown(written)}")
    return numbers
