"""When things happen: a step and the loop of them, asynchronous and interleaved training, evaluation, the guard.

Reading order: `step`, `trainer`, `task`, `tasks`, `runner`, `options`, `loop`, `pipeline`, `expression`, `evaluation`,
`guard`, `task_weights`, `asynchronous`, `interleaved`, `calls`, `batches`, `signals`.
"""

from verl.trainer.guard import Alert, SafetyGuard

__all__ = ["Alert", "SafetyGuard"]
