"""A task on its actor: what draws, scores, records and evaluates its samples."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from verl._base.names import disjoint
from verl._host.user_calls import is_async
from verl.algorithms import BaseAlgorithm
from verl.batch import Batch
from verl.data.forms import uncollated
from verl.data.tokenize import KnownPrompts
from verl.dataflow import loop
from verl.dataflow.executor import Result, all_of, combined
from verl.dataflow.graph import Graph, Node
from verl.dataflow.nodes import RolloutNode, UpdateNode
from verl.dataflow.scores import (
    by_episode,
    episode_metrics,
    left_out_reasons,
    own_samples,
    sample_metrics,
    score_metrics,
    written_tokens,
)
from verl.errors import ConfigError, DataError, RolloutError
from verl.report.metrics import Metric, add_metrics
from verl.report.samples import kl_to_reference, rejected_rows, retried_groups
from verl.rewards.failures import Failures
from verl.roles.actor import Actor
from verl.roles.critic import Critic, as_critic, copy_of
from verl.roles.updater import Updater
from verl.rollout.base import SamplingParams, as_sampling
from verl.tasks.task import Task
from verl.trainer.evaluation import Evaluation, Metrics, evaluate
from verl.trainer.options import LimitOptions
from verl.trainer.reads import check_reads
from verl.trainer.runner import Run
from verl.trainer.step import draw
from verl.workers.actor import load_episode

logger = logging.getLogger(__name__)


class Samples(NamedTuple):
    """The samples of one task in a step.

    Attributes:
        rows: what is learned from.
        draws: what each rollout gave; the first has every prompt once. Of recorded responses there is one.
        rejected: prompts all of whose samples the algorithm rejected, to the last; None: it rejects none.
        origin: the group of the first draw that a later draw has under another name.
    """

    rows: Batch
    draws: Sequence[Result]
    rejected: int | None = None
    origin: Mapping[str, str] = MappingProxyType({})

    def scores(self, column: str) -> dict[str, list[float | None]]:
        """A column of rewards of all samples that were drawn, those that were rejected too, by their prompt.

        Raises:
            DataError: there is no such column.
        """
        scores: dict[str, list[float | None]] = {}
        for result in self.draws:
            samples = by_episode(own_samples(result.batch))
            for group, score in zip(samples["group"], samples[column], strict=True):
                scores.setdefault(self.origin.get(group, group), []).append(score)
        return scores


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

    def __init__(self, task: Task, actor: Actor, critic: Critic | None, run: Run, limits: LimitOptions) -> None:
        self.task, self.name, self.algorithm = task, task.name, task.algorithm
        self.sources, self.n, self.actor, self._run = task.sources, task.n, actor, run
        self.sampling = as_sampling(task.sampling, actor.sampling)
        self._is_checked, self._problems = False, KnownPrompts()
        played = actor.rollout_options
        if task.episode is not None and task.episode is not load_episode(played.episode):
            actor.play(task.name, task.episode)
        if self.algorithm.needs_constraint and not (task.episode or played.episode):
            raise ConfigError(
                f"task '{self.name}': algorithm '{self.algorithm.name}' samples under a constraint: give the task one "
                "(constraint_model in YAML, episode=ConstrainedEpisode(...) in Python)"
            )
        self.updater = Updater(task.algorithm, actor=actor, critic=critic)
        self.episodes, self._max_resamples = Failures(limits.max_failed_episodes), limits.max_resamples
        episode = load_episode(actor.rollout_options.episodes.get(task.name, actor.rollout_options.episode))
        self._max_left_out = float(getattr(episode, "max_left_out", 1.0))
        #: What is done with samples: rewards and nodes of the user's, and forwards of models.
        self.nodes: list[Node] = [*task.nodes, *UpdateNode(self.updater).experience()]
        sampled = []
        if self.algorithm.online:
            _warn_of_masks(actor, self.sampling, task.name)
            sampled = [self._rollout(self.n, self.sampling, self.algorithm.greedy_baseline)]
        self.graph = Graph([*sampled, *self.nodes])
        #: The user's own, by name.
        self.metrics: dict[str, Metric] = {}

    def _rollout(self, n: int, params: SamplingParams, greedy_baseline: bool = False) -> Node:
        rollout = RolloutNode(
            self.actor,
            n=n,
            params=params,
            algorithm=self.algorithm,
            greedy_baseline=greedy_baseline,
            task=self.name,
        )
        return rollout.as_node("rollout")

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
        graph = Graph([self._rollout(n, params), *self.task.nodes])
        with ExitStack() as stack:
            for source in self.sources.values():
                stack.enter_context(source.apart())
            collect = lambda rows: self._run.wait(draw(graph, rows, self._run, in_step=False)).batch  # noqa: E731
            return evaluate(problems, collect, metrics, self._run.deadline)

    def evaluate_loss(self, batch: Any) -> dict[str, float]:
        """See `Trainer.evaluate_loss`."""
        state_before = self.algorithm.state_dict()
        try:
            recorded = self._run.wait(self.replay(self.rows(batch, "eval"), "eval", in_step=False))
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

    async def collect(self, rows: Batch, key: str) -> Samples:
        """Samples for a batch of prompts, or recorded responses as samples.

        Prompts whose samples the algorithm rejects are sampled again, at most `max_resamples` times; after that the
        step goes on with what there is.

        Args:
            key: begins the ids of recorded rows that have none.
        """
        if "response_tokens" in rows:
            recorded = await self.replay(rows, key)
            return Samples(recorded.batch, [recorded])
        if not self.algorithm.online:
            raise DataError(
                f"algorithm '{self.algorithm.name}' learns from recorded responses and this batch has none: "
                "give batches of an OfflineDatasetLoader made with the actor's tokenizer"
            )
        draws = [await self._draw(rows)]
        # Most algorithms reject nothing, and are not asked.
        rejects = type(self.algorithm).keep is not BaseAlgorithm.keep
        keep = await self._keep(draws[0].batch) if rejects else None
        if keep is None:
            return Samples(draws[0].batch, draws)
        kept = [draws[0].batch.filter(keep)]
        origin = {group: group for group in rows["group"]}
        while (again := rejected_rows(rows, kept, origin)) and len(draws) <= self._max_resamples:
            retry = rows.take(again)
            groups = retried_groups(retry["group"], len(draws), origin)
            draws.append(await self._draw(retry.drop(["group", "id"]).add({"group": groups})))
            more = draws[-1].batch
            kept.append(more.filter(await self._keep(more) or [True] * len(more)))
        return Samples(Batch.concat(kept), draws, len(again), origin)

    async def score(self, group: Batch) -> Result:
        """The rewards of one group that rollout workers have drawn, as far as they need no other group."""
        graph = Graph(self._unwritten(group), group.columns)
        alone: dict[str, Node] = {}
        for name in graph.order:
            node = graph.nodes[name]
            # A node of a shared slot excludes others of its run, and several groups are several runs. One that may
            # write nothing would be run again by `replay`.
            waits = is_async(node.run) and node.slot == name and any(node.writes.values())
            if node.kind == "rows" and node.groups == 1 and waits and alone.keys() >= {*graph.needs[name]}:
                alone[name] = replace(node, at_end=None)  # of a whole step, see `record`
        return await draw(Graph(alone.values(), group.columns), group, self._run)

    async def collect_drawn(self, groups: Sequence[Future[Result]], key: str) -> Samples:
        """What `score` gave of groups that rollout workers have drawn, as samples; those that the algorithm rejects are
        left out."""
        results = await all_of(map(asyncio.wrap_future, groups))
        result = await self.replay(Batch.concat(group.batch for group in results), key)
        metrics = combined([(len(group.batch), group.metrics) for group in results])
        result = replace(result, metrics=disjoint("a metric of a node", metrics, result.metrics))
        keep = await self._keep(result.batch)
        return Samples(result.batch if keep is None else result.batch.filter(keep), [result])

    async def replay(self, rows: Batch, key: str, *, in_step: bool = True) -> Result:
        """Recorded responses: without a rollout, and without the nodes whose column has been recorded."""
        rows = self.algorithm.extend(rows)
        if "id" not in rows:
            rows = rows.add({"id": [f"{key}.{row}" for row in range(len(rows))]})
        return await draw(Graph(self._unwritten(rows), rows.columns), rows, self._run, in_step=in_step)

    def _unwritten(self, rows: Batch) -> list[Node]:
        """The nodes that work on samples, without those whose column has been recorded."""
        return [node for node in self.nodes if not node.writes.keys() & set(rows.columns)]

    def record(self, samples: Samples) -> dict[str, Any]:
        """The metrics of samples.

        Raises:
            DataError, RewardError, ConfigError: of a user's metric, see `Metric`.
        """
        for node in self.nodes:
            if node.at_end is not None:
                node.at_end()
        first = own_samples(samples.draws[0].batch)
        ended = by_episode(first)
        record: dict[str, Any] = score_metrics(ended)
        if "rollout" in samples.draws[0].timings:
            record |= self._rollout_metrics(samples.draws)
            drawn = [own_samples(result.batch) for result in samples.draws]
            record |= _failures([*map(by_episode, drawn)]) | episode_metrics(Batch.concat(drawn))
        if samples.rejected is not None:
            record |= {"rollout/resamples": len(samples.draws) - 1, "rollout/rejected_prompts": samples.rejected}
        of_nodes = combined([(len(result.batch), result.metrics) for result in samples.draws])
        record = disjoint("a metric of a node", record, of_nodes)
        add_metrics(
            record,
            {name: metric(ended, self._run.deadline)[0] for name, metric in self.metrics.items()},
            self.metrics,
        )
        return record

    @staticmethod
    def _rollout_metrics(draws: Sequence[Result]) -> dict[str, Any]:
        """Lengths and KL of the first rollout, which has every prompt once; tokens and time of all."""
        first = own_samples(draws[0].batch)
        generated = sum(written_tokens(result.batch) for result in draws)
        busy = sum(result.timings["rollout"].busy for result in draws)
        return {
            **sample_metrics(first),
            "rollout/tokens": generated,
            "rollout/tokens_per_s": generated / max(busy, 1e-9),
            "time/rollout": busy,
            **({"kl": kl_to_reference(first)} if "ref_log_probs" in first else {}),
        }

    async def _draw(self, prompts: Batch) -> Result:
        result = await draw(self.graph, prompts, self._run)
        if "episode_error" in result.batch:
            self._count_episodes(own_samples(result.batch))
        return result

    async def _keep(self, samples: Batch) -> Sequence[bool] | None:
        """Which samples the algorithm keeps. In the compute thread: it may be a user's."""
        return await asyncio.wrap_future(loop.submit(self.algorithm.keep, samples).result)

    def _count_episodes(self, samples: Batch) -> None:
        errors = by_episode(samples)["episode_error"]
        reasons = left_out_reasons(samples)
        if sum(reasons.values()) > self._max_left_out * len(errors):
            counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            latest = next((error for error in reversed(errors) if error is not None), "no reward")
            raise RolloutError(
                f"{sum(reasons.values())} of {len(errors)} episodes of this step are left out ({counts}; latest: "
                f"{latest}), more than max_left_out={self._max_left_out:g} of them: mend the agent, or raise it"
            )
        self.episodes.add(error is not None for error in errors)
        if self.episodes.too_many:
            latest = next((error for error in reversed(errors) if error is not None), "earlier")
            raise RolloutError(
                f"the episode failed on {self.episodes} (latest: {latest}). Mend it, raise its deadline, or raise "
                "max_failed_episodes (in settings reward.max_failure_rate)"
            )


def _failures(draws: Sequence[Batch]) -> dict[str, Any]:
    """Abstentions, failures and rejections, of all rollouts of a step."""
    metrics: dict[str, Any] = {}
    if "reward" in draws[0]:
        metrics["reward/abstained"] = sum(samples["reward"].count(None) for samples in draws)
    if "rejected" in draws[0]:
        failed = sum(error is not None for samples in draws for error in samples["episode_error"])
        tried = sum(sum(samples["rejected"]) + len(samples) for samples in draws) - failed
        ended = sum(finish in ("stop", "length") for samples in draws for finish in samples["finish"])
        metrics["rollout/rejection_rate"] = 1 - ended / max(tried, 1)
        metrics["rollout/failed_episodes"] = failed
    return metrics


def _warn_of_masks(actor: Actor, sampling: SamplingParams, task: str) -> None:
    of_task = actor.rollout_options.episodes.get(task)
    grammar = actor.masks if of_task is None else getattr(of_task, "masks", False)
    masks = {"top_k": sampling.top_k > 0, "top_p": sampling.top_p < 1, "min_p": sampling.min_p > 0}
    if on := [*(name for name, is_on in masks.items() if is_on), *(["a grammar"] if grammar else [])]:
        logger.warning(
            "%s: samples come from the masked policy, log-probs are those of the policy without the mask, so the "
            "gradient is biased by as much as the mask takes away",
            ", ".join(on),
        )
