"""The import path `verl.actor`; the homes are in `verl.roles`."""

from verl.roles.actor import Actor
from verl.roles.backends import HfModelAdapter, VLLMActor, VLLMActorModel
from verl.roles.servers import vLLMAdapter

__all__ = ["Actor", "HfModelAdapter", "VLLMActor", "VLLMActorModel", "vLLMAdapter"]
