"""Helpers that are useful beside training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.utils.device_mesh import init_device_mesh

__all__ = ["init_device_mesh"]


def __getattr__(name: str) -> Any:
    if name == "init_device_mesh":  # torch is imported when it is used
        from verl.utils.device_mesh import init_device_mesh

        return init_device_mesh
    raise AttributeError(f"module 'verl.utils' has no attribute '{name}'")
