"""When things happen: the training loop, evaluation, checkpoints, the run directory and its report."""

from verl.trainer.guard import Alert, SafetyGuard

__all__ = ["Alert", "SafetyGuard"]
