"""The graph of a run's step from its settings alone, without a model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from verl.algorithms import BaseAlgorithm, make_algorithm
from verl.batch import Batch
from verl.config import Config, CostConfig
from verl.config.schema import REWARDS
from verl.dataflow.graph import Graph
from verl.dataflow.nodes import RewardNode, RolloutNode, UpdateNode
from verl.rewards.forms import recognise
from verl.rewards.model import RewardModel
from verl.rewards.source import RewardResult
from verl.roles.reads import VALUES, reads
from verl.roles.reward import Reward
from verl.rollout.options import SamplerOptions
from verl.trainer.check import source_options
from verl.trainer.task import MAIN
from verl.trainer.task_file import algorithm_of


class _UnreadModel:
    """Stands for a reward model, whose weights are not read."""

    name = "model"
    whole_batch = True
    columns = recognise(partial(RewardModel.scores, None)).columns  # type: ignore[arg-type]

    async def score(self, batch: Batch) -> RewardResult:
        raise NotImplementedError("an outline computes nothing")


def outline(config: Config) -> dict[str, Graph]:
    """The graph of each task, equal to that of its trainer. Imports the user's functions.

    Raises:
        ConfigError, RewardError: an algorithm or a reward is none.
    """
    if not config.tasks:
        algorithm = make_algorithm(config.algorithm.name, **config.algorithm.options)
        given = {role: _source(getattr(config, role)) for role in ("reward", "cost")}
        sources = {role: source for role, source in given.items() if source is not None}
        return {MAIN: _graph(config, MAIN, algorithm, sources)}
    return {
        task.name: _graph(
            config,
            task.name,
            algorithm_of(task),
            {} if task.reward_model is None else {"reward": _made(task.reward_model, task.reward_config)},
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


def _source(section: CostConfig) -> Reward | None:
    if not section.is_given:
        return None
    if section.components:
        return Reward({name: (_made(**source_options(part)), part.weight) for name, part in section.components.items()})
    return _made(**source_options(section))


def _made(source: Any, options: Any = None, **others: Any) -> Reward:
    unread = _unread(source)
    return Reward(unread) if isinstance(unread, _UnreadModel) else Reward(unread, **(options or {}), **others)


def _unread(source: Any) -> Any:
    """A source with the stand-in in the place of every model in it."""
    if isinstance(source, Mapping):
        if "source" not in source:
            return {name: _unread(part) for name, part in source.items()}
        inner = _unread(source["source"])
        return inner if isinstance(inner, _UnreadModel) else {**source, "source": inner}
    if isinstance(source, list | tuple):
        return type(source)(_unread(part) for part in source)
    is_named = isinstance(source, str) and (source in REWARDS or ".py:" in source or "://" in source)
    return _UnreadModel() if source == "rm_hf" or (isinstance(source, str) and not is_named) else source
