"""The public names of `verl`, for type checkers: made by `python scripts/stubs.py`."""

from verl.algorithms import BaseAlgorithm as BaseAlgorithm, register_algorithm as register_algorithm
from verl.algorithms.loss_terms import Loss as Loss, LossInput as LossInput
from verl.batch import Batch as Batch
from verl.cluster.controller import everywhere as everywhere
from verl.cluster.placement import DeviceMesh as DeviceMesh, ResourcePool as ResourcePool
from verl.data.offline import OfflineDatasetLoader as OfflineDatasetLoader
from verl.dataflow.nodes import RewardNode as RewardNode, RolloutNode as RolloutNode, UpdateNode as UpdateNode, register_node as register_node
from verl.rewards.registry import register_reward as register_reward
from verl.roles.actor import Actor as Actor
from verl.roles.backends import ActorRolloutRefWorker as ActorRolloutRefWorker, HfModelAdapter as HfModelAdapter, HuggingFaceWorker as HuggingFaceWorker, VLLMActor as VLLMActor, VLLMActorModel as VLLMActorModel
from verl.roles.critic import Critic as Critic
from verl.roles.group import WorkerGroup as WorkerGroup
from verl.roles.reward import Reward as Reward
from verl.roles.role_updater import PPORoleUpdater as PPORoleUpdater
from verl.roles.servers import vLLMAdapter as vLLMAdapter, vLLMWorker as vLLMWorker
from verl.roles.updater import Updater as Updater
from verl.roles.workers import FSDPWorker as FSDPWorker, MegatronWorker as MegatronWorker
from verl.rollout.base import SamplingParams as SamplingParams
from verl.rollout.environments import EnvironmentEpisode as EnvironmentEpisode
from verl.rollout.gateway.gateway import Gateway as Gateway
from verl.trainer.asynchronous import AsyncTrainer as AsyncTrainer
from verl.trainer.expression import Controller as Controller
from verl.trainer.interleaved import InterleavedTrainer as InterleavedTrainer
from verl.trainer.pipeline import RLDataPipeline as RLDataPipeline
from verl.trainer.task import Task as Task
from verl.trainer.trainer import PPOTrainer as PPOTrainer, Trainer as Trainer
from verl.weights.shard import Shard as Shard

__version__: str
