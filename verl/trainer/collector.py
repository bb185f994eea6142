"""The scored samples of one task in a step: drawn from prompts, anew where the algorithm rejects them, or recorded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from verl.algorithms import BaseAlgorithm
from verl.batch import Batch
from verl.dataflow import loop
from verl.dataflow.graph import Graph, Node
from verl.dataflow.groups import all_of
from verl.dataflow.nodes import RolloutNode, UpdateNode
from verl.dataflow.result import Result, combined
from verl.dataflow.scores import (
    by_episode,
    episode_metrics,
    left_out_reasons,
    own_samples,
    sample_metrics,
    score_metrics,
    written_tokens,
)
from verl.errors import DataError, RolloutError
from verl.names import disjoint
from verl.report.metrics import Metric, add_metrics
from verl.report.samples import kl_to_reference, rejected_rows, retried_groups
from verl.rewards.failures import Failures
from verl.roles.actor import Actor
from verl.roles.updater import Updater
from verl.rollout.base import SamplingParams
from verl.trainer.runner import Run
from verl.trainer.step import draw
from verl.user_calls import is_async
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


class SampleCollector:
    """Samples with everything that the algorithm reads: rewards, reference log-probs, values.

    Args:
        updater: the algorithm and its models.
        nodes: what is done with samples before any model reads them, such as rewards.
        task: its name.
        n, sampling: samples a prompt, and how they are drawn.
        max_resamples: further rollouts for prompts whose samples the algorithm rejects.
        episodes: counts episodes that failed.
    """

    def __init__(
        self,
        updater: Updater,
        nodes: Sequence[Node],
        runner: Run,
        *,
        task: str,
        n: int,
        sampling: SamplingParams,
        max_resamples: int,
        episodes: Failures,
    ) -> None:
        self.algorithm, self.episodes = updater.algorithm, episodes
        played = updater.actor.rollout_options
        episode = load_episode(played.episodes.get(task, played.episode))
        self.max_left_out = float(getattr(episode, "max_left_out", 1.0))
        self.max_resamples, self._runner = max_resamples, runner
        self.nodes: list[Node] = [*nodes, *UpdateNode(updater).experience()]
        if self.algorithm.online:
            _warn_of_masks(updater.actor, sampling, task)
            rollout = RolloutNode(
                updater.actor,
                n=n,
                params=sampling,
                algorithm=self.algorithm,
                greedy_baseline=self.algorithm.greedy_baseline,
                task=task,
            )
            self.nodes.insert(0, rollout.as_node("rollout"))
        self.graph = Graph(self.nodes)
        #: The user's own, by name.
        self.metrics: dict[str, Metric] = {}

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
        while (again := rejected_rows(rows, kept, origin)) and len(draws) <= self.max_resamples:
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
        return await draw(Graph(alone.values(), group.columns), group, self._runner)

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
        return await draw(Graph(self._unwritten(rows), rows.columns), rows, self._runner, in_step=in_step)

    def _unwritten(self, rows: Batch) -> list[Node]:
        """The nodes that work on samples, without those whose column has been recorded."""
        return [n for n in self.nodes if n.kind != "source" and not n.writes.keys() & set(rows.columns)]

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
            {name: metric(ended, self._runner.deadline)[0] for name, metric in self.metrics.items()},
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
        result = await draw(self.graph, prompts, self._runner)
        if "episode_error" in result.batch:
            self._count_episodes(own_samples(result.batch))
        return result

    async def _keep(self, samples: Batch) -> Sequence[bool] | None:
        """Which samples the algorithm keeps. In the compute thread: it may be a user's."""
        return await asyncio.wrap_future(loop.submit(self.algorithm.keep, samples).result)

    def _count_episodes(self, samples: Batch) -> None:
        errors = by_episode(samples)["episode_error"]
        reasons = left_out_reasons(samples)
        if sum(reasons.values()) > self.max_left_out * len(errors):
            counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            latest = next((error for error in reversed(errors) if error is not None), "no reward")
            raise RolloutError(
                f"{sum(reasons.values())} of {len(errors)} episodes of this step are left out ({counts}; latest: "
                f"{latest}), more than max_left_out={self.max_left_out:g} of them: mend the agent, or raise it"
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
