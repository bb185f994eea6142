"""A sandbox for untrusted programs.

Reading order: `run`, `jail`, `code_tests`, `run_tests`, `link`, `values`, `pytest_stub`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.sandbox.run import Limits, Run, command_job, jailed, require, run_python

__all__ = ["Limits", "Run", "command_job", "jailed", "require", "run_python"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'verl.sandbox' has no attribute '{name}'")
    from verl.sandbox import run  # a process that is to end with its parent needs `jail` alone

    return getattr(run, name)
