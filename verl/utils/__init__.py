"""Helpers that are useful beside training.

Reading order: `memory`, `batching`, `communication`, `debugging`, `device_mesh`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.utils.device_mesh import init_device_mesh

__all__ = ["DynamicTaskWeightScheduler", "init_device_mesh"]

#: What is imported when it is used: torch; and what stands above, for scripts that look here.
_LATER = {"init_device_mesh": "verl.utils.device_mesh", "DynamicTaskWeightScheduler": "verl.tasks.weights"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'verl.utils' has no attribute '{name}'")
    return getattr(import_module(_LATER[name]), name)
