"""`RLDataPipeline`: a graph written as a list of stages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from verl.batch import Batch
from verl.controller.controller import Controller
from verl.dataflow import nodes
from verl.dataflow.executor import DEADLINE, Result, run_graph
from verl.dataflow.graph import ANY, Graph, Node
from verl.errors import ConfigError
from verl.roles.actor import Actor
from verl.roles.reward import Reward
from verl.roles.updater import Updater


class RLDataPipeline:
    """Stages by name, run as one graph; what does not depend on each other overlaps.

    >>> pipeline = RLDataPipeline()
    >>> pipeline.add_stage("rollout", actor).add_stage("reward", reward_fn).add_stage("update", updater)
    >>> result = pipeline.run(["Once upon a time"] * 4)

    A stage is one of
        an `Actor`, a `Reward`, an `Updater`
        an object with `as_node(name)`, which returns a `Node` or several
        a `Node`, which gets the stage's name
        a function of one parameter `batch`: it gets all columns of some samples and returns new ones, as a `Batch`
            or a mapping of lists
        any other function: a reward function, in one of the forms of `Reward`.

    Args:
        n: samples a prompt; None: what suits the updater's algorithm.
        deadline: seconds for one call of a stage, and for ranks to wait for each other.
    """

    def __init__(self, *, n: int | None = None, deadline: float = DEADLINE) -> None:
        self.n = n
        self.deadline = deadline
        self.stages: dict[str, Any] = {}

    def add_stage(self, name: str, stage: Any) -> RLDataPipeline:
        """Append a stage and return the pipeline.

        Raises:
            ConfigError: the name is taken, or the object cannot be a stage.
        """
        if name in self.stages:
            raise ConfigError(f"the pipeline has a stage '{name}' already")
        if not (isinstance(stage, Actor | Reward | Node) or hasattr(stage, "as_node") or callable(stage)):
            raise ConfigError(
                f"stage '{name}' is a {type(stage).__name__}: give an Actor, Reward, Updater, Node or function"
            )
        self.stages[name] = stage
        return self

    @property
    def graph(self) -> Graph:
        """The graph that `run` runs."""
        for controller in self._controllers():
            controller.wait(self.deadline)
        return Graph([node for name, stage in self.stages.items() for node in self._nodes(name, stage)])

    def run(self, prompts: Any) -> Result:
        """One pass of the prompts through all stages.

        Args:
            prompts: a `Batch`, or what the first stage with a method `prompts` takes (`Actor`: strings, chats, ids).
        """
        if not isinstance(prompts, Batch):
            encoder = next((stage for stage in self.stages.values() if hasattr(stage, "prompts")), None)
            if encoder is None:
                raise ConfigError("no stage of the pipeline takes plain prompts: add an Actor, or run a Batch")
            prompts = encoder.prompts(prompts)
        return run_graph(self.graph, prompts, deadline=self.deadline)

    def _controllers(self) -> set[Controller]:
        """Of the models of all stages."""
        handles: list[Any] = [stage for stage in self.stages.values() if isinstance(stage, Actor)]
        for stage in self.stages.values():
            handles += [stage.actor, *stage.critics.values()] if isinstance(stage, Updater) else []
        return {handle.controller for handle in handles}

    def _nodes(self, name: str, stage: Any) -> Iterable[Node]:
        if isinstance(stage, Actor):
            # What is learned decides how many samples of a prompt it takes.
            learned = next((s.algorithm for s in self.stages.values() if isinstance(s, Updater)), None)
            baseline = learned is not None and learned.greedy_baseline
            n = 1 if learned is None else learned.samples_per_prompt
            return [nodes.rollout_node(name, stage, n=self.n or n, algorithm=learned, greedy_baseline=baseline)]
        if isinstance(stage, Reward):
            return [nodes.reward_node(name, stage)]
        if isinstance(stage, Updater):
            return [*nodes.experience_nodes(stage), *nodes.update_nodes(name, stage)]
        if isinstance(stage, Node):
            slot = "" if stage.slot == stage.name else stage.slot
            return [replace(stage, name=name, slot=slot)]
        if hasattr(stage, "as_node"):
            made = stage.as_node(name)
            return [made] if isinstance(made, Node) else made
        if list(inspect.signature(stage).parameters) == ["batch"]:
            return [Node(name=name, run=_columns(stage), inputs=(ANY,), outputs=(ANY,))]
        return [nodes.reward_node(name, Reward(reward_fn=stage))]


def _columns(function: Callable[[Batch], Any]) -> Callable[[Batch], Any]:
    """The function, with a mapping of columns that it returns made a batch."""

    def as_batch(value: Any) -> Any:
        return Batch.from_columns(value) if isinstance(value, Mapping) else value

    async def awaiting(batch: Batch) -> Any:
        return as_batch(await function(batch))

    return awaiting if inspect.iscoroutinefunction(function) else lambda batch: as_batch(function(batch))
