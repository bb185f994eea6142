"""This machine's accelerator, if it has one, and the memory of devices and of the host.

The one place that asks which devices there are. Imported without torch.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from verl.errors import ConfigError, shown

if TYPE_CHECKING:
    import torch
    from torch import nn

    M = TypeVar("M", bound=nn.Module)

logger = logging.getLogger(__name__)

#: Devices that this process, or another rank of its job on this machine, uses, now or later.
claimed: set[str] = set()
#: Graphs of a device are replayed one at a time and share their memory.
_graph_pools: dict[str, Any] = {}

#: Kinds whose copies from and to pinned memory the host need not wait for.
_PINNED = ("cuda", "xpu")
# Bounds of the two caches of compiled products: oneDNN's and that of torch's interface to it.
_PRODUCT_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def _accelerators() -> Any:
    """torch's interface to the accelerators, whatever their kind. Tests replace it."""
    import torch

    return torch.accelerator


def accelerator() -> str | None:
    """The kind of accelerator that torch can use here ("cuda", "xpu", "mps", ...), or None."""
    api = _accelerators()
    return str(api.current_accelerator().type) if api.is_available() and api.device_count() else None


def default_kind() -> str:
    """Where models run unless a placement says otherwise: the accelerator where there is one, else "cpu"."""
    kind = accelerator()
    return "cpu" if kind in (None, "mps") else kind  # mps has no fp64, which sampling needs


def count(kind: str) -> int:
    """Devices of that kind which this process sees; 0 for "cpu"."""
    return int(_accelerators().device_count()) if kind == accelerator() else 0


def device_name(device: str) -> str:
    """The driver's name of a device, such as "NVIDIA H100 80GB HBM3", or else its kind."""
    read = getattr(_module(device), "get_device_name", None)
    return device if not is_accelerator(device) or read is None else str(read(device))


def in_use() -> set[int]:
    """Numbers of the accelerators that are claimed, or hold tensors of this process."""
    kind = accelerator()
    holding = {i for i in range(count(kind)) if _accelerators().memory_reserved(f"{kind}:{i}")} if kind else set()
    names = (name.partition(":") for name in claimed)
    return holding | {int(index or 0) for claimed_kind, _, index in names if claimed_kind == kind}


def is_here(device: str) -> bool:
    """Whether a device is the host, or of the kind of this machine's accelerators."""
    return device.partition(":")[0] in ("cpu", accelerator())


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable inside, for libraries that read it as they start."""
    before, os.environ[name] = os.environ.get(name), value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        os.environ.update({} if before is None else {name: before})


def synchronize() -> None:
    """Wait until the accelerator, if any, is idle."""
    if accelerator() is not None:
        _accelerators().synchronize()


def initialize() -> None:
    """Start the accelerators' runtime, so that changes of `CUDA_VISIBLE_DEVICES` have no effect on this process."""
    kind = accelerator()
    if kind is not None and hasattr(_module(kind), "init"):
        _module(kind).init()


def generators() -> dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]]:
    """How the state of each accelerator's random generator is read and set, by device ("cuda:0"); "mps" has one."""
    if (kind := accelerator()) is None or not hasattr(module := _module(kind), "get_rng_state"):
        return {}
    if kind == "mps":
        return {kind: (module.get_rng_state, module.set_rng_state)}
    names = [f"{kind}:{index}" for index in range(count(kind))]
    return {name: (partial(module.get_rng_state, name), partial(module.set_rng_state, device=name)) for name in names}


def put(module: M, device: str | None = None) -> M:
    """The module on `device` (None: the default kind). A kind without a number leaves it on a device of that kind.

    Raises:
        ConfigError: there is no such device, or no room on it.
    """
    to = target(module, device)
    try:
        return module if to == of(module) else module.to(to)
    except RuntimeError as error:
        raise ConfigError(f"a model cannot be put on device={shown(to)}: {error}") from error


def target(module: nn.Module, device: str | None = None) -> str:
    """Where `put` leaves a module."""
    device, here = device or default_kind(), of(module)
    return here if device in (here, here.partition(":")[0]) else device


def of(module: nn.Module) -> str:
    """The device of a module's first weight; "cpu" for a module without weights."""
    return next((str(weight.device) for weight in module.parameters()), "cpu")


class HostCopy:
    """Numbers on their way from a device: one copy into pinned memory, which the host waits for only when it reads
    them. A decode step gets its results through this class alone.

    Args:
        columns: `[N]` each, whole numbers below 2^53 among them.
    """

    def __init__(self, *columns: torch.Tensor) -> None:
        import torch

        values = self._values = torch.stack([column.detach().double() for column in columns])
        self._done: Any = None
        if values.device.type in _PINNED:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            module = _module(str(values.device))
            self._done = module.Event()
            self._done.record(module.current_stream(values.device))

    def read(self) -> list[list[float]]:
        """The columns as lists."""
        if self._done is not None:
            self._done.synchronize()
        return self._values.tolist()


def to_device(values: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy host values to a device, without waiting for the device's earlier work."""
    if device.type in _PINNED and values.is_cpu:
        values = values.pin_memory()
    return values.to(device, dtype, non_blocking=True)


def is_host(device: torch.device) -> bool:
    """Whether the host reads this device's numbers without waiting. Tests replace it."""
    return device.type == "cpu"


def recorded(function: Callable[[], None], device: torch.device) -> Callable[[], None] | None:
    """The function, which reads and writes the same memory of a device at each call, as a CUDA graph: its kernels are
    launched together. None where it cannot be recorded, because it waits for the device.

    Warm-up and capture call it a few times, so it must be repeatable. Tests replace this function.
    """
    import torch

    with torch.cuda.device(device):
        try:
            stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(2):  # what is made at first use is made here
                    function()
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=_graph_pools.setdefault(str(device), torch.cuda.graph_pool_handle())):
                function()
        except RuntimeError as error:
            logger.warning("no CUDA graph of a decode step, whose kernels are launched one by one: %s", error)
            return None
    return graph.replay


def free_memory(device: torch.device | str) -> int:
    """Bytes that this process can still allocate on a device, or on the host ("cpu").

    Raises:
        ConfigError: there is no device of that kind here.
    """
    name = str(device)
    if _is_host(name):
        return _free_on_host()
    # The driver counts all that torch has reserved as taken; what of it no tensor has is free for the next one.
    api = _accelerators()
    return int(api.get_memory_info(name)[0]) + int(api.memory_reserved(name)) - int(api.memory_allocated(name))


def free_share(device: str) -> float:
    """The fraction of an accelerator's memory that no process has allocated.

    Raises:
        ConfigError: the device is missing here, or is the host.
    """
    return int(_accelerators().get_memory_info(device)[0]) / total_memory(device)


def total_memory(device: torch.device | str) -> int:
    """Bytes that an accelerator has. Raises ConfigError: the device is missing here, or is the host."""
    if _is_host(str(device)):
        raise ConfigError("the total memory is of an accelerator; of the host there is what is free")
    return _total(_accelerators(), str(device))


@cache
def _total(api: Any, device: str) -> int:
    return int(api.get_memory_info(device)[1])  # asked for once: the driver may take its time to answer


def peak_memory(device: torch.device | str) -> int:
    """The most bytes that this process has held at once: of tensors on a device, resident on the host ("cpu").

    Raises:
        ConfigError: there is no device of that kind here.
    """
    return _peak_on_host() if _is_host(str(device)) else int(_accelerators().max_memory_allocated(str(device)))


def _module(device: str) -> Any:
    """`torch.cuda`, `torch.xpu` and the like. Tests replace it."""
    import torch

    return getattr(torch, device.partition(":")[0], None)


def is_accelerator(device: str) -> bool:
    """Whether a device is one of this machine's accelerators."""
    return device.partition(":")[0] == accelerator()


def _is_host(device: str) -> bool:
    """Whether a device's memory is the host's.

    Raises:
        ConfigError: it is a device of a kind that is not here, of which the host's memory says nothing.
    """
    if not is_here(device):
        raise ConfigError(f"there is no device '{device}' here, so nothing is known of its memory")
    return not is_accelerator(device)


def limit_library_memory() -> None:
    """Keep a process's memory flat over thousands of steps. To be called before the first product in half precision,
    and best before any library starts threads; later calls change nothing.

    oneDNN keeps code for every shape of a half-precision product that it has met, up to half a megabyte each and 1,024
    of them: the shapes of training are new in each step. Environment variables that are already set are kept.

    glibc's allocator serves all threads from one arena, since the compute thread's own would fragment.
    """
    for name in _PRODUCT_CACHES:
        os.environ.setdefault(name, "128")
    glibc("mallopt", -8, 1)  # M_ARENA_MAX


def glibc(name: str, *arguments: int) -> None:
    """Call a function of glibc, where the system has that library."""
    if sys.platform.startswith("linux") and (function := getattr(ctypes.CDLL(None), name, None)):
        function(*arguments)


def _free_on_host() -> int:
    """Bytes that this process can still allocate: what the machine has free, within the limits of its
    cgroups.

    Page cache that can be dropped counts as free. Where nothing tells what is free (macOS), the physical
    memory.
    """
    free = [limit - used for limit, used in _cgroups()]
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
    except OSError:
        free.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(free))


def _peak_on_host() -> int:
    """Highest resident memory of this process so far, in bytes; 0 where the system does not tell
    (Windows)."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _cgroups() -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of the memory cgroups that this process is in, and of their parents."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be the host's: then only the root of the mount is there.
        group = root / path.strip("/")
        for directory in (group, *group.parents):
            if directory == root.parent:
                break
            yield from _limit(directory, *names)


def _limit(directory: Path, limit: str, used: str, cache: str) -> Iterator[tuple[int, int]]:
    try:
        most = (directory / limit).read_text(encoding="ascii").strip()
        now = int((directory / used).read_text(encoding="ascii"))
        stat = (directory / "memory.stat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return
    droppable = int(stat[stat.index(cache) + 1]) if cache in stat else 0
    if most != "max" and int(most) < 1 << 60:  # v1 writes "no limit" as the largest multiple of the page size
        yield int(most), now - droppable
