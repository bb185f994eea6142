"""The import path `verl.actor`; the homes are `verl.roles.actor` and `verl.roles.backends`."""

from verl.roles.actor import Actor
from verl.roles.backends import HfModelAdapter, VLLMActor, VLLMActorModel, vLLMAdapter

__all__ = ["Actor", "HfModelAdapter", "VLLMActor", "VLLMActorModel", "vLLMAdapter"]
