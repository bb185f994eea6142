"""The import path `verl.worker`; the homes are `verl.roles.backends` and `verl.roles.servers`."""

from verl.roles.backends import ActorRolloutRefWorker, HuggingFaceWorker
from verl.roles.servers import vLLMWorker

__all__ = ["ActorRolloutRefWorker", "HuggingFaceWorker", "vLLMWorker"]
