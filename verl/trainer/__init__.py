"""When things happen: a step and the loop of them, asynchronous and interleaved training, evaluation, the guard.

Reading order: `step`, `trainer`, `task`, `tasks`, `runner`, `options`, `loop`, `pipeline`, `expression`, `mixture`,
`evaluation`, `guard`, `asynchronous`, `interleaved`, `ppo_trainer`, `calls`, `batches`, `update_buffer`, `signals`,
`records`, `checks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.trainer.guard import Alert, SafetyGuard

__all__ = ["Alert", "SafetyGuard"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # a run without a guard loads none
        from verl.trainer import guard

        return getattr(guard, name)
    raise AttributeError(f"module 'verl.trainer' has no attribute '{name}'")
