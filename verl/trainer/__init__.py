"""When things happen: the training loop, asynchronous and interleaved training, evaluation, the guard.

Reading order: `trainer`, `experience`, `learning`, `active_task`, `mixture`, `evaluation`, `guard`, `asynchronous`,
`interleaved`, `requirements`, `calls`, `batches`, `reads`, `waiting`, `signals`, `outcome`, `task_records`.
"""

from verl.trainer.guard import Alert, SafetyGuard

__all__ = ["Alert", "SafetyGuard"]
