"""A sandbox for untrusted programs."""

from verl.sandbox.run import Limits, Run, require, run_python

__all__ = ["Limits", "Run", "require", "run_python"]
