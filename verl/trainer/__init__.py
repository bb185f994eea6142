"""When things happen: the training loop, evaluation, checkpoints, the run directory and its report.

Reading order: `trainer`, `experience`, `learning`, `active_task`, `mixture`, `evaluation`, `guard`, `asynchronous`,
`interleaved`, `requirements`, `batches`, `reads`, `waiting`, `signals`, `outcome`, `task_records`.
"""

from verl.trainer.guard import Alert, SafetyGuard

__all__ = ["Alert", "SafetyGuard"]
