"""The import path `verl.worker`; the home is `verl.roles.backends`."""

from verl.roles.backends import ActorRolloutRefWorker, HuggingFaceWorker, vLLMWorker

__all__ = ["ActorRolloutRefWorker", "HuggingFaceWorker", "vLLMWorker"]
