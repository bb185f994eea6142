"""The graph of a run's step from its settings alone, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verl.algorithms import BaseAlgorithm, make_algorithm
from verl.config import Config
from verl.dataflow.graph import Graph
from verl.dataflow.nodes import RewardNode, RolloutNode, UpdateNode
from verl.roles.reads import VALUES, reads
from verl.roles.reward import Reward
from verl.rollout.options import SamplerOptions
from verl.trainer.reads import sources_of
from verl.trainer.task import MAIN
from verl.trainer.task_file import algorithm_of


def outline(config: Config) -> dict[str, Graph]:
    """The graph of each task, equal to that of its trainer. Imports the user's functions.

    Raises:
        ConfigError, RewardError: an algorithm or a reward is none.
    """
    sources = {task: {role: Reward(of) for role, of in made.items()} for task, made in sources_of(config).items()}
    if not config.tasks:
        algorithm = make_algorithm(config.algorithm.name, **config.algorithm.options)
        return {MAIN: _graph(config, MAIN, algorithm, sources[MAIN])}
    return {
        task.name: _graph(
            config,
            task.name,
            algorithm_of(task),
            sources[task.name],
            is_constrained=task.constraint_model is not None,
        )
        for task in config.tasks
    }


def _graph(
    config: Config, task: str, algorithm: BaseAlgorithm, sources: dict[str, Reward], *, is_constrained: bool = False
) -> Graph:
    here = SimpleNamespace(is_local=True)
    critics: Any = {role: SimpleNamespace(controller=here) for role in VALUES if role in algorithm.roles}
    rollout = SamplerOptions(
        episode=config.actor_rollout_ref.rollout.episode, episodes={task: None} if is_constrained else {}
    )
    actor: Any = SimpleNamespace(controller=here, rollout_options=rollout, compute_ref_log_probs=None)
    updater: Any = SimpleNamespace(
        algorithm=algorithm, actor=actor, critics=critics, reads=reads(algorithm, actor, critics), prepare=None
    )
    nodes = [RewardNode(source, column=role).as_node(role) for role, source in sources.items()]
    if algorithm.online:
        sampled = RolloutNode(actor, algorithm=algorithm, greedy_baseline=algorithm.greedy_baseline, task=task)
        nodes.insert(0, sampled.as_node("rollout"))
    return Graph([*nodes, *UpdateNode(updater).as_node("update")])
