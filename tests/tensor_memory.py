"""How many bytes of tensors come into being inside a block: a deterministic stand-in for a process's peak memory."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """Counts new tensors of this thread while they live. Views of others, and of files that are mapped into memory, are
    not new; bytes (messages between ranks) are not counted.

    Attributes:
        peak: most bytes at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.now = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        found = func(*args, **(kwargs or {}))
        for storage in _storages(found):
            if storage._cdata not in given and storage._cdata not in self._sizes and not is_mapped(storage):
                self._sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage._cdata)
        return found

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _storages(values: Any) -> list[Any]:
    tensors = [
        leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and not hasattr(leaf, "placements")
    ]
    return [leaf.untyped_storage() for leaf in tensors if not leaf.is_meta and leaf.dtype != torch.uint8]


def is_mapped(storage: Any) -> bool:
    if storage.nbytes() < 4096:
        return False
    at = storage.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            low, high = (int(end, 16) for end in line.split(maxsplit=1)[0].split("-"))
            if low <= at < high:
                return True
    return False
