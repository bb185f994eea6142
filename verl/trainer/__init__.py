"""When things happen: a step and the loop of them, asynchronous and interleaved training, evaluation, the guard.

Reading order: `step`, `trainer`, `collector`, `update_phase`, `runner`, `active_task`, `options`, `keywords`,
`pipeline`, `expression`, `mixture`, `evaluation`, `guard`, `asynchronous`, `interleaved`, `requirements`, `calls`,
`batches`, `reads`, `update_buffer`, `signals`, `outcome`, `task_records`.
"""

from verl.trainer.guard import Alert, SafetyGuard

__all__ = ["Alert", "SafetyGuard"]
