"""When things happen: a step and the loop of them, asynchronous and interleaved training, evaluation, the guard.

Reading order: `step`, `trainer`, `task`, `tasks`, `runner`, `options`, `loop`, `pipeline`, `expression`, `evaluation`,
`guard`, `asynchronous`, `interleaved`, `calls`, `batches`, `signals`.
"""

from verl._base.later import later

__all__ = ["Alert", "SafetyGuard"]
#: A run without a guard loads none.
HOMES = dict.fromkeys(__all__, "verl.trainer.guard")
__getattr__ = later(__name__, HOMES)
