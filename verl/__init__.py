"""Reinforcement-learning post-training of large language models.

The algorithm is plain Python over calls:

    import verl

    actor = verl.Actor.from_pretrained("gpt2")
    trainer = verl.PPOTrainer(actor=actor, reward_fn=lambda texts: [len(text) for text in texts])
    logs = trainer.step(["Once upon a time"] * 4)

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

#: Public name -> the module that defines it.
_HOMES = {
    "Actor": "verl.roles.actor",
    "ActorRolloutRefWorker": "verl.roles.backends",
    "AsyncTrainer": "verl.trainer.asynchronous",
    "BaseAlgorithm": "verl.algorithms",
    "Batch": "verl.batch",
    "Controller": "verl.dataflow.expression",
    "Critic": "verl.roles.critic",
    "DeviceMesh": "verl.controller.placement",
    "FSDPWorker": "verl.roles.workers",
    "HfModelAdapter": "verl.roles.backends",
    "HuggingFaceWorker": "verl.roles.backends",
    "InterleavedTrainer": "verl.trainer.interleaved",
    "Loss": "verl.training.loss",
    "LossInput": "verl.training.loss",
    "MegatronWorker": "verl.roles.workers",
    "OfflineDatasetLoader": "verl.data.offline",
    "PPORoleUpdater": "verl.roles.layouts",
    "PPOTrainer": "verl.trainer.trainer",
    "RLDataPipeline": "verl.dataflow.pipeline",
    "ResourcePool": "verl.controller.placement",
    "Reward": "verl.roles.reward",
    "RewardNode": "verl.dataflow.nodes",
    "RolloutNode": "verl.dataflow.nodes",
    "SamplingParams": "verl.rollout.base",
    "Shard": "verl.shard",
    "Task": "verl.trainer.task",
    "Trainer": "verl.trainer.trainer",
    "UpdateNode": "verl.dataflow.nodes",
    "Updater": "verl.roles.updater",
    "VLLMActor": "verl.roles.backends",
    "VLLMActorModel": "verl.roles.backends",
    "WorkerGroup": "verl.roles.group",
    "everywhere": "verl.controller.controller",
    "register_algorithm": "verl.algorithms",
    "register_node": "verl.dataflow.stages",
    "register_reward": "verl.rewards.registry",
    "vLLMAdapter": "verl.roles.backends",
    "vLLMWorker": "verl.roles.backends",
}

__all__ = ["__version__", *sorted(_HOMES)]

if TYPE_CHECKING:
    from verl.algorithms import BaseAlgorithm, register_algorithm
    from verl.batch import Batch
    from verl.controller.controller import everywhere
    from verl.controller.placement import DeviceMesh, ResourcePool
    from verl.data.offline import OfflineDatasetLoader
    from verl.dataflow.expression import Controller
    from verl.dataflow.nodes import RewardNode, RolloutNode, UpdateNode
    from verl.dataflow.pipeline import RLDataPipeline
    from verl.dataflow.stages import register_node
    from verl.rewards.registry import register_reward
    from verl.roles.actor import Actor
    from verl.roles.backends import (
        ActorRolloutRefWorker,
        HfModelAdapter,
        HuggingFaceWorker,
        VLLMActor,
        VLLMActorModel,
        vLLMAdapter,
        vLLMWorker,
    )
    from verl.roles.critic import Critic
    from verl.roles.group import WorkerGroup
    from verl.roles.layouts import PPORoleUpdater
    from verl.roles.reward import Reward
    from verl.roles.updater import Updater
    from verl.roles.workers import FSDPWorker, MegatronWorker
    from verl.rollout.base import SamplingParams
    from verl.shard import Shard
    from verl.trainer.asynchronous import AsyncTrainer
    from verl.trainer.interleaved import InterleavedTrainer
    from verl.trainer.task import Task
    from verl.trainer.trainer import PPOTrainer, Trainer
    from verl.training.loss import Loss, LossInput


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'verl' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
