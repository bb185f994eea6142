"""A sandbox for untrusted programs.

Reading order: `run`, `jail`, `code_tests`, `run_tests`, `values`, `pytest_stub`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.sandbox.run import Limits, Run, require, run_python

__all__ = ["Limits", "Run", "require", "run_python"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported when a program is to be run
        from verl.sandbox import run

        return getattr(run, name)
    raise AttributeError(f"module 'verl.sandbox' has no attribute '{name}'")
