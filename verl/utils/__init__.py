"""Helpers that are useful beside training."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.utils.device_mesh import init_device_mesh

__all__ = ["DynamicTaskWeightScheduler", "init_device_mesh"]


def __getattr__(name: str) -> Any:
    if name == "init_device_mesh":  # torch is imported when it is used
        from verl.utils.device_mesh import init_device_mesh

        return init_device_mesh
    if name == "DynamicTaskWeightScheduler":  # the trainer's, which stands above: by name, for scripts that look here
        return import_module("verl.trainer.task_weights").DynamicTaskWeightScheduler
    raise AttributeError(f"module 'verl.utils' has no attribute '{name}'")
