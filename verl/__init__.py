"""Reinforcement-learning post-training of large language models.

The algorithm is plain Python over calls:

    import verl

    actor = verl.Actor.from_pretrained("gpt2")
    trainer = verl.PPOTrainer(actor=actor, reward_fn=lambda texts: [len(text) for text in texts])
    logs = trainer.step(["Once upon a time"] * 4)

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import os
import warnings
from glob import glob
from importlib import import_module

from verl._base import keywords
from verl._base.later import later

__version__ = "0.1.0"

#: Module -> the public names that it defines.
_NAMES = {
    "verl.algorithms": "BaseAlgorithm register_algorithm",
    "verl.batch": "Batch",
    "verl.cluster.controller": "everywhere",
    "verl.cluster.placement": "DeviceMesh ResourcePool",
    "verl.data.offline": "OfflineDatasetLoader",
    "verl.trainer.expression": "Controller",
    "verl.dataflow.nodes": "RewardNode RolloutNode UpdateNode register_node",
    "verl.trainer.pipeline": "RLDataPipeline",
    "verl.rewards.registry": "register_reward",
    "verl.roles.actor": "Actor",
    "verl.roles.backends": "ActorRolloutRefWorker HfModelAdapter HuggingFaceWorker VLLMActor VLLMActorModel",
    "verl.roles.servers": "vLLMAdapter vLLMWorker",
    "verl.roles.critic": "Critic",
    "verl.roles.group": "WorkerGroup",
    "verl.roles.reward": "Reward",
    "verl.roles.role_updater": "PPORoleUpdater",
    "verl.roles.updater": "Updater",
    "verl.roles.workers": "FSDPWorker MegatronWorker",
    "verl.rollout.base": "SamplingParams",
    "verl.rollout.environments": "EnvironmentEpisode",
    "verl.rollout.gateway.gateway": "Gateway",
    "verl.weights.shard": "Shard",
    "verl.trainer.asynchronous": "AsyncTrainer",
    "verl.trainer.interleaved": "InterleavedTrainer",
    "verl.trainer.task": "Task",
    "verl.trainer.trainer": "PPOTrainer Trainer",
    "verl.algorithms.loss_terms": "Loss LossInput",
}
HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *sorted(HOMES)]


__getattr__ = later(__name__, HOMES)


def __dir__() -> list[str]:
    return __all__


# Only the root may import everything; `_base` asks it which call takes a keyword.
keywords.public_calls = lambda: import_module("verl.trainer.calls").public_calls()

# Looked for beside this package alone, which takes no time: `verl doctor` looks everywhere.
if glob("verl-*.dist-info", root_dir=os.path.dirname(__path__[0])):
    from verl._base.installed import MEND, other_verl

    if other := other_verl():
        warnings.warn(f"{other[0]}: {MEND}", RuntimeWarning, stacklevel=2)
