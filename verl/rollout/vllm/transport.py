"""How weights reach vLLM's workers: as live tensors in this process, in a file, or in the memory of a device.

For other processes shards become a message of plain data that says where they are. It travels over vLLM's own channel,
and nothing in it is unpickled. The file or memory stays until the workers have answered.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from verl._host.device import synchronize
from verl.weights.shard import Shard, checksum

#: Every tensor begins at a multiple of so many bytes, whatever its dtype.
_ALIGNED = 256


#: One way to publish shards to workers: a message from which `received` makes them until the end of the block; for
#: other processes it is JSON but for tuples. `slices` are the name and shape of each shard's weight, and its offset.
Transport: TypeAlias = Callable[[Sequence[Shard]], AbstractContextManager[dict[str, Any]]]


def transport_for(trainer: str, engine: str, ranks: int) -> Transport:
    """How weights of a trainer on one device reach an engine with this many ranks, in other processes."""
    on_device = trainer.startswith("cuda") and engine.startswith("cuda")
    return partial(in_device_memory, device=trainer, ranks=ranks) if on_device else in_file


@contextmanager
def in_process(shards: Sequence[Shard]) -> Iterator[dict[str, Any]]:
    """`shards` themselves, for a worker in this process."""
    yield {"shards": shards}


@contextmanager
def in_file(shards: Sequence[Shard]) -> Iterator[dict[str, Any]]:
    """A safetensors file, in /dev/shm if there is one, deleted afterwards: `path`, `slices` and `checksum`."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="verl-weights-", dir=memory) as folder:
        path = Path(folder) / "weights.safetensors"
        shards = [replace(shard, tensor=shard.tensor.detach().cpu().contiguous()) for shard in shards]
        save_file({str(number): shard.tensor for number, shard in enumerate(shards)}, path)
        slices = [(shard.name, shard.global_shape, shard.offset) for shard in shards]
        yield {"path": str(path), "slices": slices, "checksum": checksum(shards)}


@contextmanager
def in_device_memory(shards: Sequence[Shard], device: str, ranks: int) -> Iterator[dict[str, Any]]:
    """One buffer on a device, which the workers open, so that nothing passes through the host: `memory`, `handles` (one
    a rank), `views` (dtype, shape and first byte of each), `slices`, `checksum`.

    Args:
        device: where the buffer is; its kind is one of `MEMORIES`.
        ranks: workers. Each gets a handle of its own, since a handle counts one reader.
    """
    sizes = [math.ceil(shard.nbytes / _ALIGNED) * _ALIGNED for shard in shards]
    buffer = torch.zeros(max(sum(sizes), _ALIGNED), dtype=torch.uint8, device=device)
    views = [
        (str(shard.tensor.dtype).removeprefix("torch."), tuple(shard.tensor.shape), begin)
        for shard, begin in zip(shards, accumulate(sizes, initial=0), strict=False)
    ]
    for view, shard in zip(_views(buffer, views), shards, strict=True):
        view.copy_(shard.tensor.detach())
    handles = [MEMORIES[buffer.device.type].share(buffer.untyped_storage()) for _ in range(ranks)]
    message = {
        "memory": buffer.device.type,
        "views": views,
        "slices": [(shard.name, shard.global_shape, shard.offset) for shard in shards],
        "checksum": device_checksum(buffer),
        "handles": [[part.hex() if isinstance(part, bytes) else part for part in handle] for handle in handles],
    }
    synchronize()  # what fills the buffer is done before another process reads it
    yield message


class Memory(NamedTuple):
    """How a device's storage is shared with another process: as numbers and bytes, from which that one opens it."""

    share: Callable[[torch.UntypedStorage], Sequence[Any]]
    open: Callable[..., torch.UntypedStorage]


def _share_on_cuda(storage: torch.UntypedStorage) -> Sequence[Any]:
    index, *handle = storage._share_cuda_()
    return [str(torch.cuda.get_device_properties(index).uuid).encode(), *handle]


def _open_on_cuda(uuid: bytes, *handle: Any) -> torch.UntypedStorage:
    """Devices have other numbers in another process: the one that the memory is on is found by its UUID."""
    seen = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if uuid.decode() not in seen:
        raise ValueError(f"the weights are on device {uuid.decode()}, which this worker does not see, only {seen}")
    return torch.UntypedStorage._new_shared_cuda(seen.index(uuid.decode()), *handle)


#: Kind of device -> how its memory is shared. That of the CPU is torch's shared memory.
MEMORIES: Mapping[str, Memory] = {
    "cuda": Memory(_share_on_cuda, _open_on_cuda),
    "cpu": Memory(torch.UntypedStorage._share_filename_cpu_, torch.UntypedStorage._new_shared_filename_cpu),
}


def received(message: Mapping[str, Any], rank: int, device: torch.device | str) -> list[Shard]:
    """The shards of a message, in a worker's own memory.

    Args:
        rank: of the worker.
        device: of the worker; shards of a file are on the CPU.

    Raises:
        ValueError: they cannot be reached, or are not those that were sent.
    """
    if "shards" in message:
        return list(message["shards"])
    path = message.get("path")
    if "memory" in message:
        tensors = _from_device(message, rank, torch.device(device))
    elif path is None or not Path(path).is_file():
        raise ValueError(f"no weights came: there is no file '{path}' where this worker runs")
    else:
        stored = load_file(path)
        tensors = [stored[str(number)] for number in range(len(stored))]
    slices = zip(message["slices"], tensors, strict=True)
    shards = [Shard(name, tuple(shape), tuple(offset), tensor) for (name, shape, offset), tensor in slices]
    if path is not None and checksum(shards) != message["checksum"]:
        raise ValueError(f"the weights in {path} are not those that were sent")
    return shards


def _from_device(message: Mapping[str, Any], rank: int, device: torch.device) -> list[Tensor]:
    memory = MEMORIES.get(message["memory"])
    if memory is None:
        raise ValueError(f"this worker cannot open memory of '{message['memory']}', only of {', '.join(MEMORIES)}")
    handle = [bytes.fromhex(part) if isinstance(part, str) else part for part in message["handles"][rank]]
    storage = memory.open(*handle)
    shared = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    # A copy, since vLLM may keep shards until a layer is whole, and the sender uses its memory again.
    buffer = shared.to(device, copy=True)
    if device_checksum(buffer) != message["checksum"]:  # it waits for the copy
        raise ValueError("the weights in device memory are not those that were sent")
    return _views(buffer, message["views"])


def device_checksum(buffer: Tensor) -> str:
    """Two sums of a buffer `[bytes]` (a multiple of 8) modulo 2^64, computed on its device. One is weighted by odd
    multipliers, so that swapped words are seen. It finds damage, and is no defence."""
    words = buffer.view(torch.int64)
    odd = torch.arange(words.numel(), device=buffer.device).mul_(0x1E3779B97F4A7C15).bitwise_or_(1)
    sums = torch.stack([words.sum(), odd.mul_(words).sum()]).tolist()
    return f"{sums[0] % (1 << 64):016x}{sums[1] % (1 << 64):016x}"


def _views(buffer: Tensor, views: Sequence[Sequence[Any]]) -> list[Tensor]:
    """Views of the parts of a buffer `[bytes]`."""
    tensors = []
    for name, shape, begin in views:
        dtype: torch.dtype = getattr(torch, name)
        end = begin + math.prod(shape) * dtype.itemsize
        tensors.append(buffer[begin:end].view(dtype).view(tuple(shape)))
    return tensors
