"""A sandbox for untrusted programs.

Reading order: `run`, `jail`, `code_tests`, `run_tests`, `link`, `pytest_stub`.
"""

from verl.sandbox.run import Limits, Run, command_job, jailed, require, run_python

__all__ = ["Limits", "Run", "command_job", "jailed", "require", "run_python"]
