"""Helpers for scripts around training.

Reading order: `memory`, `batching`, `communication`, `debugging`.
"""

from verl._base.later import later

__all__ = ["DynamicTaskWeightScheduler", "init_device_mesh"]
#: The first imports torch; the second is for scripts that look for it here.
HOMES = {"init_device_mesh": "verl.cluster.world", "DynamicTaskWeightScheduler": "verl.trainer.task_weights"}
__getattr__ = later(__name__, HOMES)
