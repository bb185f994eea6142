"""The scored samples of a step: sampled from prompts, with resampling of what the algorithm rejects, or recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from verl.batch import Batch
from verl.dataflow.executor import Result, combined
from verl.dataflow.graph import Graph, Node
from verl.dataflow.nodes import RolloutNode, UpdateNode
from verl.dataflow.scores import own_samples, sample_metrics, score_metrics, written_tokens
from verl.errors import DataError, RolloutError
from verl.report.metrics import Metric, add_metrics
from verl.report.samples import kl_to_reference, rejected_rows, retried_groups
from verl.rewards.failures import Failures
from verl.roles.actor import Actor
from verl.roles.updater import Updater
from verl.rollout.base import SamplingParams

logger = logging.getLogger(__name__)


class Experience:
    """Samples with everything that the algorithm reads: rewards, reference log-probs, values.

    Args:
        updater: the algorithm and its models.
        nodes: what is done with samples before any model reads them, such as rewards.
        run: runs a graph on a batch.
        task: its name.
        n, sampling: samples a prompt, and how they are drawn.
        max_resamples: further rollouts for prompts whose samples the algorithm rejects.
        episodes: counts episodes that failed.
    """

    def __init__(
        self,
        updater: Updater,
        nodes: Sequence[Node],
        run: Callable[[Graph, Batch], Result],
        *,
        task: str,
        n: int,
        sampling: SamplingParams,
        max_resamples: int,
        episodes: Failures,
    ) -> None:
        self.updater, self.algorithm, self.episodes = updater, updater.algorithm, episodes
        self.max_resamples, self._run = max_resamples, run
        self.nodes: list[Node] = [*nodes, *UpdateNode(updater).experience()]
        if self.algorithm.online:
            _warn_of_masks(updater.actor, sampling, task)
            made_for: dict[str, Any] = {"algorithm": self.algorithm, "greedy_baseline": self.algorithm.greedy_baseline}
            made_for["task"] = task
            self.nodes.insert(0, RolloutNode(updater.actor, n=n, params=sampling, **made_for).as_node("rollout"))
        self.graph = Graph(self.nodes)
        self.metrics: dict[str, Metric] = {}

    def collect(self, prompts: Batch) -> tuple[Batch, dict[str, Any]]:
        """Samples for a batch of prompts, and metrics.

        Prompts whose samples the algorithm rejects are sampled again, at most `max_resamples` times; after that
        the step goes on with what there is.
        """
        if not self.algorithm.online:
            raise DataError(
                f"algorithm '{self.algorithm.name}' learns from recorded responses and this batch has none: "
                "give batches of an OfflineDatasetLoader made with the actor's tokenizer"
            )
        drawn = [self._draw(prompts)]
        keep = self.algorithm.keep(drawn[0].batch)
        if keep is None:
            return drawn[0].batch, self._metrics(drawn)
        kept = [drawn[0].batch.filter(keep)]
        origin = {group: group for group in prompts["group"]}
        while (again := rejected_rows(prompts, kept, origin)) and len(drawn) <= self.max_resamples:
            retry = prompts.take(again)
            groups = retried_groups(retry["group"], len(drawn), origin)
            drawn.append(self._draw(retry.drop(["group", "id"]).add({"group": groups})))
            more = drawn[-1].batch
            kept.append(more.filter(self.algorithm.keep(more) or [True] * len(more)))
        rounds = {"rollout/resamples": len(drawn) - 1, "rollout/rejected_prompts": len(again)}
        return Batch.concat(kept), self._metrics(drawn) | rounds

    def replay(self, batch: Batch, key: str) -> tuple[Batch, dict[str, Any]]:
        """Recorded responses as samples: without a rollout, and without the nodes whose column has been recorded.

        Args:
            key: begins the ids of rows that have none.
        """
        batch = self.algorithm.extend(batch)
        if "id" not in batch:
            batch = batch.add({"id": [f"{key}.{row}" for row in range(len(batch))]})
        nodes = [n for n in self.nodes if n.kind != "source" and not n.writes.keys() & set(batch.columns)]
        result = self._run(Graph(nodes, batch.columns), batch)
        return result.batch, {**score_metrics(own_samples(result.batch)), **result.metrics}

    def own_metrics(self, samples: Batch) -> dict[str, float]:
        """What the user's functions compute from the policy's samples.

        Raises:
            DataError, RewardError: see `Metric`.
        """
        samples = own_samples(samples)
        return {name: metric(samples)[0] for name, metric in self.metrics.items()}

    def _draw(self, prompts: Batch) -> Result:
        result = self._run(self.graph, prompts)
        if "episode_error" in result.batch:
            self._count_episodes(own_samples(result.batch)["episode_error"])
        return result

    def _metrics(self, drawn: list[Result]) -> dict[str, Any]:
        """Of the rollouts of a step: rewards, lengths and KL of the first, which has every prompt once; tokens, time,
        abstentions and failures of all; what nodes measured, combined over all."""
        batch, batches = own_samples(drawn[0].batch), [own_samples(result.batch) for result in drawn]
        generated = sum(written_tokens(result.batch) for result in drawn)
        busy = sum(result.timings["rollout"].busy for result in drawn)
        record: dict[str, Any] = {
            **score_metrics(batch),
            **sample_metrics(batch),
            "rollout/tokens": generated,
            "rollout/tokens_per_s": generated / max(busy, 1e-9),
            "time/rollout": busy,
            **({"kl": kl_to_reference(batch)} if "ref_log_probs" in batch else {}),
            **combined([(len(result.batch), result.metrics) for result in drawn]),
        }
        if "reward" in batch:
            record["reward/abstained"] = sum(samples["reward"].count(None) for samples in batches)
        if "rejected" in batch:
            failed = sum(error is not None for samples in batches for error in samples["episode_error"])
            tried = sum(sum(samples["rejected"]) + len(samples) for samples in batches) - failed
            ended = sum(end in ("stop", "length") for samples in batches for end in samples["finish"])
            record["rollout/rejection_rate"] = 1 - ended / max(tried, 1)
            record["rollout/failed_episodes"] = failed
        add_metrics(record, self.own_metrics(batch), self.metrics)
        return record

    def _count_episodes(self, errors: list[str | None]) -> None:
        self.episodes.add(error is not None for error in errors)
        if self.episodes.too_many:
            latest = next((error for error in reversed(errors) if error is not None), "earlier")
            raise RolloutError(
                f"the episode failed on {self.episodes} (latest: {latest}). Mend it, raise its deadline, or raise "
                "max_failed_episodes (in settings reward.max_failure_rate)"
            )


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
