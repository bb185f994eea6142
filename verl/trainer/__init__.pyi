"""The public names of `verl.trainer`, for type checkers: made by `python scripts/stubs.py`."""

from verl.trainer.guard import Alert as Alert, SafetyGuard as SafetyGuard
