"""A stand-in for CUDA graphs on a CPU: recorded operations run again, into the same memory, without their Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class Recording(TorchDispatchMode):
    """Notes every operation and what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.note(func, args, kwargs or {})

    def note(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]))
        return out

    def replay(self) -> None:
        for func, args, kwargs, before in self.calls:
            again = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, torch.Tensor)]
            for old, new in zip(before, again, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


_active: list[Recording] = []


def recorded(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """As `verl._host.device.recorded`."""
    for _ in range(2):
        function()
    recording = Recording()
    _active.append(recording)
    try:
        with recording:
            function()
    finally:
        _active.pop()
    assert recording.calls

    def replay() -> None:
        with torch.no_grad():
            recording.replay()

    return replay


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one operation, whose Python runs at each replay."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return _active[-1].note(function, args, kwargs) if _active else function(*args, **kwargs)

    return call
