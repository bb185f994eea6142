"""Transformers models: the packed forward, log-probs, value heads, loading, weights as shards, memory.

Reading order: `loading`, `source`, `fit`, `heads`, `packed`, `log_probs`, `outputs`, `lora`,
`adapter_check`, `llama`, `rope`, `wrapped`, `save`, `portable`, `options`, `memory`, `head_sizes`, `int4`,
`probe`, `check`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["get_actor_critic"]


def __getattr__(name: str) -> Any:
    if name == "get_actor_critic":  # of the handles, which stand above: by name, for scripts that import it from here
        return import_module("verl.roles.backends").get_actor_critic
    raise AttributeError(f"module 'verl.models' has no attribute '{name}'")
