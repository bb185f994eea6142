"""The one map of placement: which role's ranks stand on which slots, read from every form a user may write.

A slot is one rank's place: "cuda:3", or with the same meaning "cpu:3". Roles that share slots are colocated, roles with
slots of their own run apart; nothing else decides it. Under torchrun slot number i is rank i.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl import device
from verl.errors import ConfigError, nearest
from verl.layout import PARALLEL

ROLES = ("actor", "rollout", "critic", "cost_critic", "reference", "reward", "cost")
_KEYS = ("slots", "device", "gpu_ids", "cpu_ids", "parallel", "node", "accelerator")
# As it is written -> as torch calls it: AMD's GPUs are "cuda" there, too.
_KINDS = {"cuda": "cuda", "gpu": "cuda", "rocm": "cuda", "cpu": "cpu", "mps": "mps"}
#: Ranks of the largest job: a bound for what is written, not for what is there.
MOST_SLOTS = 1 << 14
_RANGE = re.compile(r"([a-z]+)(?::(\d[\d,\s-]*))?")


@dataclass(frozen=True, order=True)
class Slot:
    """One rank's place; on a Ray cluster `node` and `accelerator` may say where."""

    kind: str
    index: int
    node: str = ""
    accelerator: str = ""

    @property
    def is_named(self) -> bool:
        """Whether it names a node or a type of accelerator."""
        return bool(self.node or self.accelerator)

    def __str__(self) -> str:
        node, accelerator = f"@{self.node}" if self.node else "", f" ({self.accelerator})" if self.accelerator else ""
        return f"{self.kind}:{self.index}{node}{accelerator}"


@dataclass(frozen=True)
class ResourcePool:
    """The slots of a role.

    Args:
        slots: "cuda:0-3", "cpu:0,2", "cuda:4", or a list of such.
        parallel: how the role's ranks share its model: "data" (as its settings say), "tensor", "pipeline", "sequence"
            or "expert".

    Raises:
        ConfigError: it cannot be read, or names a slot twice.
    """

    slots: tuple[Slot, ...]
    parallel: str = "data"

    def __init__(self, slots: str | Slot | Iterable[str | Slot], parallel: str = "data") -> None:
        found = [slot for part in ([slots] if isinstance(slots, str | Slot) else slots) for slot in _slots(part)]
        if not found:
            raise ConfigError("placement: a pool needs at least one slot, such as 'cuda:0' or 'cpu:0'")
        _check_count(len(found), "a pool")
        slot, times = Counter(found).most_common(1)[0]
        if times > 1:
            raise ConfigError(f"placement: slot {slot} is named twice in one pool")
        if len({slot.kind for slot in found}) > 1:
            raise ConfigError(f"placement: one pool is of one kind of device, got {', '.join(map(str, found))}")
        if parallel not in PARALLEL:
            raise ConfigError(f"placement: there is no parallel='{parallel}': {nearest(str(parallel), PARALLEL)}")
        object.__setattr__(self, "slots", tuple(sorted(found)))
        object.__setattr__(self, "parallel", parallel)

    def __len__(self) -> int:
        return len(self.slots)

    def __str__(self) -> str:
        return ", ".join(map(str, self.slots))

    @classmethod
    def numbered(cls, first: int, count: int) -> ResourcePool:
        """So many slots from number `first` on, on the accelerator where there is one, else on the CPU."""
        if count < 1:
            raise ConfigError(f"placement: a pool needs at least one slot, not {count}")
        _check_count(count, "a pool")
        return cls([Slot(device.default_kind(), index) for index in range(first, first + count)])

    @classmethod
    def parse(cls, given: Any) -> ResourcePool:
        """From any form: a pool, "cuda:0-3", `{"gpu_ids": [0, 1], "parallel": "data"}`, `{"device": "cuda:4"}`.

        On a Ray cluster such a mapping may also have "node" (name, address, or number, the head being 0; its slots are
        counted by themselves) and "accelerator" (a type, such as "H100").
        """
        if isinstance(given, ResourcePool):
            return given
        if not isinstance(given, Mapping):
            if isinstance(given, str | Slot | Sequence):
                return cls(given)
            raise ConfigError(f"placement: give slots such as 'cuda:0-3' or {{'gpu_ids': [0, 1]}}, not {given!r}")
        if unknown := next((key for key in given if key not in _KEYS), None):
            raise ConfigError(f"placement has no key '{unknown}': {nearest(str(unknown), _KEYS)}")
        where = [key for key in _KEYS[:4] if given.get(key) is not None]
        if len(where) != 1:
            raise ConfigError(f"placement: give one of {', '.join(_KEYS[:4])}, got {', '.join(where) or 'none'}")
        value = given[where[0]]
        if where[0] in ("gpu_ids", "cpu_ids"):
            kind = "cuda" if where[0] == "gpu_ids" else "cpu"
            value = [Slot(kind, index) for index in _numbers(where[0], value)]
        pool = cls(value, given.get("parallel") or "data")
        node, accelerator = (str("" if given.get(key) is None else given[key]) for key in ("node", "accelerator"))
        return cls([replace(slot, node=node, accelerator=accelerator) for slot in pool.slots], pool.parallel)


@dataclass(frozen=True)
class DeviceMesh:
    """Which role stands where: checked when it is made, printed as a picture.

    >>> print(DeviceMesh({"actor": "cpu:0-1", "critic": "cpu:2"}))
            actor  critic
    cpu:0   0/2    ·
    cpu:1   1/2    ·
    cpu:2   ·      0/1

    Args:
        placement: role -> pool, in any form of `ResourcePool.parse`, or a number of slots, which are then the next
            free ones; a lone pool is the actor's. "rollout" is where the actor's generation runs, "reward" and
            "cost" where their models do: these run in the script's process if they are not named, other roles that
            are not named stand where the actor does. Pools may share slots.

    Raises:
        ConfigError: an unknown role, slots of several kinds, or the policy trains on some of the slots that it
            generates on.
    """

    pools: Mapping[str, ResourcePool] = field(default_factory=dict)

    def __init__(self, placement: Any) -> None:
        if isinstance(placement, DeviceMesh):
            placement = placement.pools
        is_map = isinstance(placement, Mapping) and not set(placement) & set(_KEYS)
        given = placement if is_map else {"actor": placement}
        if not given:
            raise ConfigError("placement: the map is empty: name at least the actor's slots")
        pools: dict[str, ResourcePool] = {}
        free = 0  # the first slot that no role before this one has taken
        for role, where in given.items():
            if role not in ROLES:
                raise ConfigError(f"placement: there is no role '{role}': {nearest(str(role), ROLES)}")
            is_count = isinstance(where, int) and not isinstance(where, bool)
            pools[role] = ResourcePool.numbered(free, where) if is_count else ResourcePool.parse(where)
            free = max(free, pools[role].slots[-1].index + 1)
        object.__setattr__(self, "pools", pools)
        if len(kinds := {slot.kind for slot in self.slots}) > 1:
            raise ConfigError(f"placement: the slots of one map are of one kind, got {' and '.join(sorted(kinds))}")
        if "actor" in pools and "rollout" in pools:
            trains, generates = pools["actor"], pools["rollout"]
            common = set(trains.slots) & set(generates.slots)
            if common and set(trains.slots) != set(generates.slots):
                raise ConfigError(
                    f"placement: the pools of 'actor' ({len(trains)} slots: {trains}) and 'rollout' ({len(generates)} "
                    f"slots: {generates}) overlap in {len(common)}: the policy trains and generates on the same slots, "
                    "or on others"
                )

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots, each once, in order."""
        return tuple(sorted({slot for pool in self.pools.values() for slot in pool.slots}))

    def pool(self, role: str) -> ResourcePool:
        """Where a role stands: on its own pool, else where the actor does, else on the first there is."""
        return self.pools.get(role) or self.pools.get("actor") or next(iter(self.pools.values()))

    def check(self, available: Mapping[str, int], where: str) -> None:
        """Compare with what there is.

        Args:
            available: kind of device -> number of slots.
            where: what has them, for the message.

        Raises:
            ConfigError: slots are missing; names the role, what it asks for and what there is.
        """
        for role, pool in self.pools.items():
            for slot in pool.slots:
                count = available.get(slot.kind, 0)
                if slot.index >= count:
                    raise ConfigError(
                        f"placement: role '{role}' asks for slot {slot} (of {pool}), and {where} has {count} "
                        f"{slot.kind} slots{f' ({slot.kind}:0-{count - 1})' if count > 1 else ''}"
                    )

    def picture(self, roles: Iterable[str]) -> str:
        """Slots down, roles across: which of the role's ranks stands where."""
        pools = {role: self.pool(role) for role in roles}
        rows = [["", *pools]]
        for slot in self.slots:
            cells = (f"{pool.slots.index(slot)}/{len(pool)}" if slot in pool.slots else "·" for pool in pools.values())
            rows.append([str(slot), *cells])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def __str__(self) -> str:
        return self.picture(self.pools)

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.pools.items(), key=lambda item: item[0])))


def _slots(given: str | Slot) -> list[Slot]:
    if isinstance(given, Slot):
        return [replace(given, kind=_kind(given.kind, given))]
    text = str(given).strip().lower()
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ConfigError(f"placement: '{given}' is no slot: write 'cuda:0', 'cuda:0-3' or 'cpu:0,2'")
    kind, numbers = _kind(match[1], given), match[2] or "0"
    found = []
    for part in numbers.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        if max(len(first), len(last)) > 9:
            raise ConfigError(f"placement: '{given[:40]}' has a number of a slot that no machine has")
        if not first.isdigit() or (last and not last.isdigit()) or (last and int(last) < int(first)):
            raise ConfigError(f"placement: '{given}' is no range of slots: write '{kind}:0-3' or '{kind}:0,2'")
        _check_count(int(last or first) - int(first) + 1, f"'{given}'")
        found += [Slot(kind, i) for i in range(int(first), int(last or first) + 1)]
    if kind == "mps" and found != [Slot("mps", 0)]:
        raise ConfigError(f"placement: '{given}': a Mac has one device, 'mps:0'")
    return found


def _check_count(count: int, what: str) -> None:
    """Refuse at once what no cluster has; a smaller number is compared with what there is when slots are started."""
    if count > MOST_SLOTS:
        raise ConfigError(f"placement: {what} names {count} slots, and a job has at most {MOST_SLOTS} ranks")


def _kind(name: str, given: str | Slot) -> str:
    if name not in _KINDS:
        raise ConfigError(f"placement: '{given}': there is no kind of device '{name}': {nearest(name, _KINDS)}")
    return _KINDS[name]


def _numbers(key: str, given: Any) -> list[int]:
    """Numbers of slots, one or several."""
    numbers = list(given) if isinstance(given, list | tuple | range) else [given]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ConfigError(f"placement: {key} are numbers from 0 on, such as [0, 1], not {given!r}")
    return numbers
