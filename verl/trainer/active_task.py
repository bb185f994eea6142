"""A task on its actor: what collects, prepares and evaluates its samples."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from verl.batch import Batch
from verl.data.forms import uncollated
from verl.data.tokenize import KnownPrompts
from verl.dataflow.graph import Graph
from verl.dataflow.nodes import RolloutNode
from verl.errors import ConfigError, RolloutError
from verl.names import disjoint
from verl.rewards.failures import Failures
from verl.roles.actor import Actor
from verl.roles.critic import Critic, as_critic, copy_of
from verl.roles.updater import Updater
from verl.rollout.base import as_sampling
from verl.tasks.task import Task
from verl.trainer.collector import SampleCollector
from verl.trainer.evaluation import Evaluation, Metrics, evaluate
from verl.trainer.options import LimitOptions
from verl.trainer.reads import check_reads
from verl.trainer.runner import Run
from verl.trainer.step import draw
from verl.workers.actor import load_episode

logger = logging.getLogger(__name__)


def critics_of(tasks: Sequence[Task], critic: Any) -> dict[str, Critic | None]:
    """The critic of each task, or None where it is made from the actor: its own, or else `critic`. Several tasks with a
    critic that are given one have a copy of it each."""
    shared, used = as_critic(critic), False
    critics: dict[str, Critic | None] = {}
    for task in tasks:
        critics[task.name] = as_critic(task.critic)
        if task.critic is None and shared is not None and ("critic" in task.algorithm.roles or len(tasks) == 1):
            critics[task.name] = copy_of(shared) if used else shared
            used = True
    if shared is not None and not used:
        logger.warning("no task has a critic: the one that is given is not used")
    return critics


class ActiveTask:
    """A `Task` with the actor it trains and the critics it has."""

    def __init__(
        self,
        task: Task,
        actor: Actor,
        critic: Critic | None,
        runner: Run,
        limits: LimitOptions,
    ) -> None:
        self.task, self.name, self.algorithm = task, task.name, task.algorithm
        self.sources, self.n, self._runner = task.sources, task.n, runner
        self.actor = actor
        self.sampling = as_sampling(task.sampling, actor.sampling)
        self._is_checked, self._problems = False, KnownPrompts()
        if task.episode is not None and task.episode is not load_episode(actor.rollout_options.episode):
            actor.play(task.name, task.episode)
        if self.algorithm.needs_constraint and not (task.episode or actor.rollout_options.episode):
            raise ConfigError(
                f"task '{self.name}': algorithm '{self.algorithm.name}' samples under a constraint: give the task one "
                "(constraint_model in YAML, episode=ConstrainedEpisode(...) in Python)"
            )
        self.updater = Updater(task.algorithm, actor=actor, critic=critic)
        self.episodes = Failures(limits.max_failed_episodes)
        self.collector = SampleCollector(
            self.updater,
            task.nodes,
            runner,
            task=self.name,
            n=self.n,
            sampling=self.sampling,
            max_resamples=limits.max_resamples,
            episodes=self.episodes,
        )

    @property
    def critic(self) -> Critic | None:
        return self.updater.critics.get("critic")

    def rows(self, prompts: Any, key: str) -> Batch:
        """Prompts as `Actor.prompts` makes them; for an offline algorithm recorded rows (`OfflineDatasetLoader`), or a
        batch that a collator made of them."""
        if self.algorithm.online or isinstance(prompts, Batch):
            return self.actor.prompts(prompts, key=key)
        prompts = uncollated(prompts, "the batch") if isinstance(prompts, Mapping) else prompts
        from verl.data.offline import OfflineDatasetLoader

        batch = OfflineDatasetLoader(prompts, self.actor.tokenizer).batch
        names = {column: [f"{key}.{name}" for name in batch[column]] for column in ("id", "group")}
        return self.actor.prompts(batch.drop(names).add(names), key=key)

    def check(self, rows: Batch) -> None:
        """Before the first samples: the prompts have what the rewards read.

        Raises:
            DataError: they lack a column.
        """
        if "response_tokens" in rows or self._is_checked:
            return
        if len(self.task.nodes) == len(self.sources):  # others may write what rewards read
            check_reads({"the prompts": rows}, [reward.source for reward in self.sources.values()])
        self._is_checked = True

    def evaluate(self, prompts: Any, metrics: Metrics = None, *, n: int = 1, **sampling: Any) -> Evaluation:
        """See `Trainer.evaluate`."""
        if not any("reward" in node.writes for node in self.task.nodes):
            raise ConfigError("samples are scored by a reward, and this trainer has none: see evaluate_loss")
        tokenized = self._problems(self.actor.tokenizer, prompts, self.actor.tools)
        problems = self.actor.prompts(tokenized, key="eval")
        if "id" in problems:  # a loader names visits, not problems
            problems = problems.drop(["id", "group"]).add({"group": [f"eval.{i}" for i in range(len(problems))]})
        params = replace(self.sampling, **{name: value for name, value in sampling.items() if value is not None})
        rollout = RolloutNode(self.actor, n=n, params=params, algorithm=self.algorithm, task=self.name)
        graph = Graph([rollout.as_node("rollout"), *self.task.nodes])
        with ExitStack() as stack:
            for source in self.sources.values():
                stack.enter_context(source.apart())
            collect = lambda rows: self._runner.wait(draw(graph, rows, self._runner, in_step=False)).batch  # noqa: E731
            return evaluate(problems, collect, metrics, self._runner.deadline)

    def evaluate_loss(self, batch: Any) -> dict[str, float]:
        """See `Trainer.evaluate_loss`."""
        state_before = self.algorithm.state_dict()
        try:
            recorded = self._runner.wait(self.collector.replay(self.rows(batch, "eval"), "eval", in_step=False))
            prepared, metrics = self.updater.prepare(recorded.batch)
        finally:
            self.algorithm.load_state_dict(state_before)
        of_loss = self.actor.compute_loss(prepared, self.algorithm)
        return disjoint(f"a metric of algorithm '{self.algorithm.name}'", metrics, of_loss)

    def check_failures(self) -> None:
        """Raises RewardError or RolloutError if every reward, or every episode, has failed so far, however few."""
        if self.episodes.all:
            raise RolloutError("every episode failed (the warnings say why), so nothing was learned: mend it")
        for source in self.sources.values():
            source.check_failures()

    def close(self) -> None:
        """End what the task has started besides itself; the next step starts it anew."""
        for source in self.sources.values():
            source.close()
