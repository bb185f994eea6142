"""The public names of `verl.utils`, for type checkers: made by `python scripts/stubs.py`."""

from verl.cluster.world import init_device_mesh as init_device_mesh
from verl.trainer.task_weights import DynamicTaskWeightScheduler as DynamicTaskWeightScheduler
