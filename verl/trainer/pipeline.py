"""`RLDataPipeline`: a graph written as a list of stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verl._base.checked import checked
from verl._base.names import disjoint
from verl._base.record import Count, Seconds
from verl.batch import Batch
from verl.dataflow.calls import DEADLINE
from verl.dataflow.executor import Result
from verl.dataflow.graph import Graph, Node
from verl.dataflow.loop import run_sync
from verl.dataflow.nodes import RolloutNode, UpdateNode, check_none_updates, is_reward_function, make_stage, stage_nodes
from verl.errors import ConfigError
from verl.roles.actor import Actor
from verl.roles.updater import Updater
from verl.trainer.runner import Run
from verl.trainer.step import draw, learn


class RLDataPipeline:
    """Stages by name, run as one graph; what does not depend on each other overlaps.

    >>> pipeline = RLDataPipeline()
    >>> pipeline.add_stage("rollout", actor).add_stage("reward", reward_fn).add_stage("update", updater)
    >>> result = pipeline.run(["Once upon a time"] * 4)

    A stage is one of
        an `Actor`, a `Reward`, an `Updater`
        a `RolloutNode`, `RewardNode` or `UpdateNode`
        the name of a registered node (`register_node`)
        an object with `as_node(name)`, which returns a `Node` or several
        a `Node`, which gets the stage's name
        a function of one parameter `batch`: it gets all columns of some samples and returns new ones, as a `Batch`
            or a mapping of lists
        any other function: a reward function, in one of the forms of `Reward`.

    Args:
        n: samples a prompt; None: what suits the updater's algorithm.
        deadline: seconds for one call of a stage, and for ranks to wait for each other.
    """

    @checked
    def __init__(self, *, n: Count | None = None, deadline: Seconds = DEADLINE) -> None:
        self.n = n
        self.deadline = deadline
        self.stages: dict[str, Any] = {}

    @checked
    def add_stage(self, name: str, stage: Any = None) -> RLDataPipeline:
        """Append a stage and return the pipeline; None: the node that is registered by this name.

        Raises:
            ConfigError: the name is taken, no node is registered by it, or the object cannot be a stage.
        """
        if name in self.stages:
            raise ConfigError(f"the pipeline has a stage '{name}' already")
        try:
            self.stages[name] = make_stage(name if stage is None else stage)
        except ConfigError as error:
            raise ConfigError(f"stage '{name}': {error}") from None
        return self

    @property
    def graph(self) -> Graph:
        """The graph that `run` runs."""
        names = [name for name, stage in self.stages.items() if is_reward_function(stage)]
        if len(names) > 1:  # one of them is meant as something else
            raise ConfigError(
                f"the functions of the stages {' and '.join(map(repr, names))} are both taken for the reward: one that "
                "filters or changes samples has the single parameter `batch` (def f(batch): return batch.filter(...)); "
                "two rewards are one Reward([f, g])"
            )
        updaters = self._updaters()
        handles: list[Any] = [model for of in updaters for model in (of.actor, *of.critics.values())]
        handles += [stage for stage in self.stages.values() if isinstance(stage, Actor)]
        handles += [stage.actor for stage in self.stages.values() if isinstance(stage, RolloutNode)]
        for controller in {handle.controller for handle in handles}:
            controller.wait(self.deadline)
        # The algorithm decides how many samples of a prompt it takes.
        algorithm = updaters[0].algorithm if updaters else None
        n = self.n or (1 if algorithm is None else algorithm.samples_per_prompt)
        baseline = algorithm is not None and algorithm.greedy_baseline
        nodes = list[Node]()
        for name, stage in self.stages.items():
            if isinstance(stage, Actor):
                stage = RolloutNode(stage, n=n, algorithm=algorithm, greedy_baseline=baseline)
            nodes += stage_nodes(name, stage)
        return Graph(nodes)

    def run(self, prompts: Any) -> Result:
        """One pass of the prompts through all stages.

        Args:
            prompts: a `Batch`, or what the first stage with a method `prompts` takes (`Actor`: strings, chats, ids).
        """
        if not isinstance(prompts, Batch):
            handles = (stage.actor if isinstance(stage, RolloutNode) else stage for stage in self.stages.values())
            encoder = next((handle for handle in handles if hasattr(handle, "prompts")), None)
            if encoder is None:
                raise ConfigError("no stage of the pipeline takes plain prompts: add an Actor, or run a Batch")
            prompts = encoder.prompts(prompts)
        run = Run(deadline=self.deadline)
        return run_sync(self._step(self.graph, prompts, run))

    async def _step(self, graph: Graph, prompts: Batch, run: Run) -> Result:
        if not (updaters := self._updaters()):
            check_none_updates(graph.nodes.values())
            return await draw(graph, prompts, run)
        updater, drawn = updaters[0], await draw(graph, prompts, run)
        samples = drawn.batch
        if not updater.algorithm.online:  # it chooses and adds rows
            async with run.calls() as calls:
                samples = await calls.in_thread("experience", updater.compute_log_probs_and_values, samples)
        (prepared,), metrics, _ = await learn(updater.actor, [(updater, samples)], run)
        metrics = disjoint("a metric of the algorithm, or of a node,", drawn.metrics, metrics)
        if samples is not drawn.batch:
            return replace(drawn, metrics=metrics)
        number = {id_: row for row, id_ in enumerate(samples["id"])}
        added = prepared.drop(samples.columns).among([number[id_] for id_ in prepared["id"]], len(samples))
        return replace(drawn, batch=samples.add(added), metrics=metrics)

    def _updaters(self) -> list[Updater]:
        stages = (stage.updater if isinstance(stage, UpdateNode) else stage for stage in self.stages.values())
        return [stage for stage in stages if isinstance(stage, Updater)]
