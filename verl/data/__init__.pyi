"""The public names of `verl.data`, for type checkers: made by `python scripts/stubs.py`."""

from verl.data.task_loader import get_dataloader as get_dataloader
