"""A step as an expression of collectives, which is lazy and a graph like any other:

from verl._base.checked import checked
from verl.dataflow import prompts, responses, experience, advantages, updates

flow = (controller.broadcast(prompts)
            .scatter(responses, worker_group=rollout_group)
            .gather(experience)
            .all_reduce(advantages)
            .scatter(updates, worker_group=update_group)
            .sync())
metrics = flow.run(prompt_batch)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from verl.cluster import controller
from verl.dataflow.calls import DEADLINE
from verl.dataflow.graph import Graph
from verl.dataflow.scores import score_metrics, without_baselines
from verl.dataflow.symbols import ORDER, Symbol, advantages, responses, updates
from verl.errors import ConfigError
from verl.roles.group import WorkerGroup
from verl.trainer.pipeline import RLDataPipeline


@dataclass(eq=False)
class Flow:
    """An expression of a step. Its calls compute nothing: each returns a longer expression, `run` runs it.

    moved: what its calls have moved so far.
    groups: symbol -> the workers that compute it.
    nodes: names of registered nodes.
    deadline: seconds, see `RLDataPipeline`.
    """

    moved: tuple[Symbol, ...] = ()
    groups: Mapping[Symbol, WorkerGroup] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    deadline: float = DEADLINE
    _runs: int = field(default=0, init=False)

    def broadcast(self, what: Symbol) -> Flow:
        """All workers may read `prompts`."""
        return self._then("broadcast", what)

    def scatter(self, what: Symbol, *, worker_group: WorkerGroup) -> Flow:
        """Rows go to the ranks of a group, which compute `responses`, or `updates` of its models."""
        if not isinstance(worker_group, WorkerGroup):
            raise ConfigError(f"worker_group is a verl.WorkerGroup(actor), not a {type(worker_group).__name__}")
        return self._then("scatter", what, {what: worker_group})

    def gather(self, what: Symbol, *nodes: str) -> Flow:
        """Put `experience` together: rewards, and the outputs of other models that the algorithm reads.

        Args:
            nodes: names of registered nodes that work on the samples, too (`verl.register_node`).
        """
        return self._then("gather", what, nodes=nodes)

    def all_reduce(self, what: Symbol) -> Flow:
        """Compute `advantages`, and all else that is a statistic of the whole batch."""
        return self._then("all_reduce", what)

    def sync(self) -> Flow:
        """Sample the next responses with the new weights. An update hands them on by itself, so this adds no node."""
        if self.moved[-1] != updates:
            raise ConfigError(f"sync() comes after scatter(updates, ...), not after {self.moved[-1].name}")
        return self

    @property
    def graph(self) -> Graph:
        """The graph that `run` runs: the same as a `Trainer`'s over these handles.

        Raises:
            ConfigError: the expression ends before anything is computed, or between `advantages` and `updates`, or its
                groups have different actors; see also `Graph`.
        """
        return self._pipeline.graph

    def run(self, prompts: Any) -> dict[str, Any]:
        """One step on these prompts.

        Args:
            prompts: strings, chats, token ids, mappings or a `Batch`, see `Actor.prompts`.

        Returns:
            The metrics of all nodes, `reward` (a mean; NaN if all abstained) and means of its parts; as of a
            `Trainer`'s step.

        Raises:
            ConfigError: as of `graph`.
            VerlError: see `verl.trainer.step.draw`.
        """
        pipeline = self._pipeline
        prompts = self.groups[responses].actor.prompts(prompts, key=f"s{self._runs}")
        result = pipeline.run(prompts)
        self._runs += 1
        return {**score_metrics(without_baselines(result.batch)), **result.metrics}

    @cached_property
    def _pipeline(self) -> RLDataPipeline:
        if responses not in self.groups or self.moved[-1] == advantages:
            raise ConfigError(f"the expression ends with {self.moved[-1].name}: go on with {self._next_call}")
        groups = dict.fromkeys(self.groups.values())
        if len({id(group.actor) for group in groups}) > 1:
            raise ConfigError(
                "the groups have different actors: updates of one would not change the responses of the other"
            )
        pipeline = RLDataPipeline(deadline=self.deadline).add_stage("rollout", self.groups[responses].actor)
        for reward in dict.fromkeys(group.reward for group in groups if group.reward is not None):
            pipeline.add_stage("reward", reward)
        for name in self.nodes:
            pipeline.add_stage(name)
        return pipeline.add_stage("update", self.groups[updates].updater) if updates in self.groups else pipeline

    def _then(
        self, method: str, what: Symbol, groups: Mapping[Symbol, WorkerGroup] | None = None, nodes: tuple[str, ...] = ()
    ) -> Flow:
        if (*self.moved, what) != ORDER[: len(self.moved) + 1] or method != what.method:
            name = getattr(what, "name", repr(what))
            after = f" after {self.moved[-1].name}" if self.moved else ""
            raise ConfigError(f"{method}({name}) has no place{after}: here comes {self._next_call}")
        groups, nodes = {**self.groups, **(groups or {})}, (*self.nodes, *nodes)
        return Flow((*self.moved, what), groups, nodes, self.deadline)

    @property
    def _next_call(self) -> str:
        """How the call is written that comes next."""
        for symbol in ORDER[len(self.moved) :]:
            group = ", worker_group=..." if symbol.method == "scatter" else ""
            return f"{symbol.method}({symbol.name}{group})"
        return "sync()"


class Controller(controller.Controller):
    __doc__ = controller.Controller.__doc__

    def broadcast(self, what: Symbol) -> Flow:
        """Begin an expression with `prompts`; see `verl.trainer.expression`."""
        return Flow(deadline=DEADLINE if self._may_change else self.transport.timeout).broadcast(what)
