"""A task: an algorithm with its rewards, and what samples, scores, records and evaluates for it on the actor."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

from verl._base.checked import checked
from verl._base.names import disjoint
from verl._base.record import AtOnce, NotNegative
from verl._host.user_calls import is_async
from verl.algorithms import BaseAlgorithm, make_algorithm
from verl.batch import Batch
from verl.config.tasks import TaskName
from verl.data.forms import uncollated
from verl.data.tokenize import KnownPrompts
from verl.dataflow import scores
from verl.dataflow.executor import Result, all_of, combined
from verl.dataflow.graph import Graph, Node
from verl.dataflow.loop import run_sync, submit
from verl.dataflow.nodes import RewardNode, RolloutNode, UpdateNode, check_none_updates, make_stages, stage_nodes
from verl.errors import ConfigError, DataError, RewardError, RolloutError
from verl.report.metrics import Metric, add_metrics
from verl.report.samples import kl_to_reference, retried_groups
from verl.rewards.failures import Failures
from verl.rewards.source import RewardSource, leaves
from verl.roles.actor import Actor
from verl.roles.critic import Critic
from verl.roles.reward import Reward
from verl.roles.updater import Updater
from verl.rollout.base import SamplingParams, as_sampling
from verl.rollout.environments import as_environments, as_episode
from verl.rollout.episode import Episode
from verl.trainer.evaluation import Evaluation, evaluation_of
from verl.trainer.options import LimitOptions
from verl.trainer.runner import Run
from verl.trainer.step import draw
from verl.workers.actor import load_episode

logger = logging.getLogger(__name__)

#: What a task is called where there is only one.
MAIN = "main"
#: Rows that `check_reads` looks at: a column that only later rows have is taken to be missing.
_ROWS = 256


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
        by_prompt: dict[str, list[float | None]] = {}
        for result in self.draws:
            samples = scores.one_row_per_episode(scores.without_baselines(result.batch))
            for group, score in zip(samples["group"], samples[column], strict=True):
                by_prompt.setdefault(self.origin.get(group, group), []).append(score)
        return by_prompt


class Task:
    """An algorithm with its rewards and its way of sampling.

    Args:
        name: what errors, metrics and files call it.
        algorithm: a name, class or instance; None: the default of `make_algorithm`.
        sources: role ("reward", "cost") -> a `Reward`, or anything `Reward` takes.
        reward, cost: the same by their own names; `reward_fn` is another name of `reward`.
        n: samples a prompt; None: what suits the algorithm (`BaseAlgorithm.samples_per_prompt`).
        share: of the prompts, relative to other tasks.
        loss_weight: of its loss, where 1 is an equal weight for each task; None: its share, so that all samples count
            alike.
        critic: the value model of this task; None: made from the actor's where the algorithm has one.
        sampling: how responses are drawn; None: as the actor does.
        episode: what happens between a prompt and its response, such as a `ConstrainedEpisode`, or a class of
            environments, whose `get_reward` is a further reward; None: as the actor does. One with a true
            attribute `gives_reward`, as a `Gateway` has, needs no other reward. It is for this
            task's prompts alone: the rollouts of others are as they are without it.
        environment: as `episode`, of environments: a class of TRL's form, a mapping of names to these, or an
            `EnvironmentEpisode`.
        nodes: further nodes of the step's graph: names of registered ones (`verl.register_node`), or a mapping of names
            to stages (see `RLDataPipeline`). One that writes `reward` or `cost` is the source of it.

    Raises:
        ConfigError: a name that is no file name; a share or weight below 0; an unknown algorithm; a reward or cost that
            is missing, or that the algorithm does not have; an `n` that does not suit the algorithm.
    """

    @checked
    def __init__(
        self,
        name: TaskName = MAIN,
        algorithm: str | BaseAlgorithm | type[BaseAlgorithm] | None = None,
        sources: Mapping[str, Any] | None = None,
        *,
        reward: Any = None,
        reward_fn: Any = None,
        cost: Any = None,
        n: AtOnce | None = None,
        share: NotNegative = 1.0,
        loss_weight: NotNegative | None = None,
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        critic: Any = None,
        episode: Any = None,
        environment: Any = None,
        nodes: Mapping[str, Any] | Iterable[str] = (),
    ) -> None:
        self.name, self.share, self.loss_weight = name, share, loss_weight
        self.critic: Any = critic
        self.sampling: Any = sampling
        self.episode: Episode | None = None if episode is None else as_episode(episode)
        if environment is not None:
            self.episode = as_environments(environment)
        self.algorithm = make_algorithm(algorithm)
        if reward is not None and reward_fn is not None:
            raise ConfigError("give one reward: reward=... or reward_fn=...")
        reward = reward_fn if reward is None else reward
        by_role = dict(sources or {})
        by_role |= {role: one for role, one in (("reward", reward), ("cost", cost)) if one is not None}
        stages = make_stages(nodes)
        further = [node for name, stage in stages.items() for node in stage_nodes(name, stage)]
        check_none_updates(further)
        written = {column for node in further for column in node.writes}
        gives_reward = getattr(self.episode, "gives_reward", False) and "reward" in self.algorithm.roles
        # Where a node writes it, agents need no source; rewards of environments have one, and clash with the node.
        if gives_reward and (hasattr(self.episode, "rewards") or "reward" not in written):
            from verl.rewards.environments import with_episodes

            by_role["reward"] = with_episodes(by_role.get("reward"), self.episode)
        roles, algorithm = {*by_role, *(written & {"reward", "cost"})}, self.algorithm
        if extra := sorted(roles - algorithm.roles - algorithm.measures):
            raise ConfigError(f"algorithm '{algorithm.name}' has no {extra[0]}: leave {extra[0]}=... out")
        if algorithm.online and (lacking := {"reward", "cost"} & algorithm.roles - roles):
            role = max(lacking)
            raise ConfigError(f"algorithm '{algorithm.name}' needs a {role}: give the trainer {role}=...")
        #: Role, or name of a further node -> where its numbers come from.
        self.sources = {r: source if isinstance(source, Reward) else Reward(source) for r, source in by_role.items()}
        #: What is done with samples before any model reads them.
        self.nodes = [RewardNode(r, column=role).as_node(role) for role, r in self.sources.items()] + further
        for name, stage in stages.items():
            if isinstance(stage, RewardNode):
                self.sources[stage.column if stage.column in ("reward", "cost") else name] = stage.reward
        self.n = self.algorithm.samples_per_prompt if n is None else n
        self.algorithm.check_samples(self.n)

    def bind(self, actor: Actor, critic: Critic | None, run: Run, limits: LimitOptions, name: str) -> None:
        """Put this task, a copy that a trainer has, on its actor.

        Args:
            name: prefix of its metrics; empty for a task alone.

        Raises:
            ConfigError: it is weighed against others and alone, or lacks the constraint of its algorithm.
        """
        if not name and (self.share, self.loss_weight) != (1.0, None):
            raise ConfigError(
                f"task '{self.name}' is the only one, with nothing to weigh it against: leave share and loss_weight out"
            )
        options = actor.rollout_options
        self.actor, self.sampling, self._run = actor, as_sampling(self.sampling, actor.sampling), run
        self._is_checked, self._problems = False, KnownPrompts()
        if self.episode is not None and self.episode is not load_episode(options.episode):
            actor.set_episode(self.name, self.episode)
        if self.algorithm.needs_constraint and not (self.episode or options.episode):
            raise ConfigError(
                f"task '{self.name}': algorithm '{self.algorithm.name}' samples under a constraint: give the task one "
                "(constraint_model in YAML, episode=ConstrainedEpisode(...) in Python)"
            )
        self.updater = Updater(self.algorithm, actor=actor, critic=critic)
        self.updater.name, self.critic = name, self.updater.critics.get("critic")
        # Log-probs are of logits at the temperature of the samples. Tasks may differ in it: then samples say theirs.
        temperature = 1.0 if name or not self.algorithm.online else self.sampling.temperature or 1.0
        actor.plan = replace(actor.plan, temperature=temperature)
        self.episodes, self._max_resamples = Failures(limits.max_failed_episodes), limits.max_resamples
        episode = load_episode(actor.rollout_options.episodes.get(self.name, actor.rollout_options.episode))
        self._max_left_out = float(getattr(episode, "max_left_out", 1.0))
        #: What is done with samples: rewards and nodes of the user's, and forwards of models.
        self._on_samples = [*self.nodes, *UpdateNode(self.updater).model_outputs()]
        sampled = []
        if self.algorithm.online:
            _warn_of_masks(actor, self.sampling, self.name)
            sampled = [self._rollout(self.n, self.sampling, self.algorithm.greedy_baseline)]
        self.graph = Graph([*sampled, *self._on_samples])
        #: The user's own, by name.
        self.metrics: dict[str, Metric] = {}

    def _rollout(self, n: int, params: SamplingParams, greedy_baseline: bool = False) -> Node:
        of_task: dict[str, Any] = {"algorithm": self.algorithm, "greedy_baseline": greedy_baseline, "task": self.name}
        return RolloutNode(self.actor, n=n, params=params, **of_task).as_node("rollout")

    def rows(self, prompts: Any, key: str) -> Batch:
        """Prompts as `Actor.prompts` makes them; for an offline algorithm recorded rows (`OfflineDatasetLoader`), or a
        batch that a collator made of them.

        Raises:
            DataError: the first prompts lack a column that the rewards read.
        """
        if self.algorithm.online or isinstance(prompts, Batch):
            rows = self.actor.prompts(prompts, key=key)
            if "response_tokens" not in rows and not self._is_checked:
                if len(self.nodes) == len(self.sources):  # others may write what rewards read
                    check_reads({"the prompts": rows}, [reward.source for reward in self.sources.values()])
                self._is_checked = True
            return rows
        prompts = uncollated(prompts, "the batch") if isinstance(prompts, Mapping) else prompts
        from verl.data.offline import OfflineDatasetLoader

        batch = OfflineDatasetLoader(prompts, self.actor.tokenizer).batch
        names = {column: [f"{key}.{name}" for name in batch[column]] for column in ("id", "group")}
        return self.actor.prompts(batch.drop(names).add(names), key=key)

    def evaluate(self, prompts: Any, metrics: Mapping[str, Metric], *, n: int = 1, **sampling: Any) -> Evaluation:
        """See `Trainer.evaluate`."""
        if not any("reward" in node.writes for node in self.nodes):
            raise ConfigError("samples are scored by a reward, and this trainer has none: see evaluate_loss")
        tokenized = self._problems(self.actor.tokenizer, prompts, self.actor.tools)
        problems = self.actor.prompts(tokenized, key="eval")
        if "id" in problems:  # a loader names visits, not problems
            problems = problems.drop(["id", "group"]).add({"group": [f"eval.{i}" for i in range(len(problems))]})
        if not len(problems):
            raise DataError("the evaluation set has no problems")
        params = replace(self.sampling, **{name: value for name, value in sampling.items() if value is not None})
        graph = Graph([self._rollout(n, params), *self.nodes])
        with ExitStack() as stack:
            for source in self.sources.values():
                stack.enter_context(source.apart())
            samples = run_sync(draw(graph, problems, self._run, in_step=False)).batch
            return evaluation_of(samples, metrics, self._run.deadline)

    async def collect(self, rows: Batch, key: str) -> Samples:
        """Samples for a batch of prompts, or recorded responses as samples.

        Prompts whose samples the algorithm rejects are sampled again, at most `max_resamples` times; after that the
        step goes on with what there is.

        Args:
            key: begins the ids of recorded rows without one.

        Raises:
            RolloutError: too many of the latest episodes failed, or of these are left out.
        """
        if "response_tokens" in rows:
            recorded = await self.replay(rows, key)
            return Samples(recorded.batch, [recorded])
        if not self.algorithm.online:
            raise DataError(
                f"algorithm '{self.algorithm.name}' learns from recorded responses and this batch has none: "
                "give batches of an OfflineDatasetLoader made with the actor's tokenizer"
            )
        draws, kept = list[Result](), list[Batch]()
        prompts, origin = rows, {group: group for group in rows["group"]}
        while True:
            draws.append(await draw(self.graph, prompts, self._run))
            samples = draws[-1].batch
            if "episode_error" in samples:
                self._check_episodes(samples)
            kept.append(await self._kept(samples))
            if kept[0] is draws[0].batch:
                return Samples(kept[0], draws)
            have = {origin[group] for batch in kept for group in batch["group"]}
            again = [row for row, group in enumerate(rows["group"]) if group not in have]
            if not again or len(draws) > self._max_resamples:
                return Samples(Batch.concat(kept), draws, len(again), origin)
            prompts = rows.take(again)
            groups = retried_groups(prompts["group"], len(draws), origin)
            prompts = prompts.drop(["group", "id"]).add({"group": groups})

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

    async def from_rollout_workers(self, groups: Sequence[Future[Result]], key: str) -> Samples:
        """What `score` gave of groups that rollout workers have drawn, as samples; those that the algorithm rejects are
        left out."""
        results = await all_of(map(asyncio.wrap_future, groups))
        result = await self.replay(Batch.concat(group.batch for group in results), key)
        metrics = combined([(len(group.batch), group.metrics) for group in results])
        result = replace(result, metrics=disjoint("a metric of a node", metrics, result.metrics))
        return Samples(await self._kept(result.batch), [result])

    async def replay(self, rows: Batch, key: str, *, in_step: bool = True) -> Result:
        """Recorded responses: without a rollout, and without the nodes whose column has been recorded."""
        rows = self.algorithm.extend(rows)
        if "id" not in rows:
            rows = rows.add({"id": [f"{key}.{row}" for row in range(len(rows))]})
        return await draw(Graph(self._unwritten(rows), rows.columns), rows, self._run, in_step=in_step)

    def _unwritten(self, rows: Batch) -> list[Node]:
        """The nodes that work on samples, without those whose column has been recorded."""
        return [node for node in self._on_samples if not node.writes.keys() & set(rows.columns)]

    def record(self, samples: Samples) -> dict[str, Any]:
        """The metrics of samples.

        Raises:
            DataError, RewardError, ConfigError: of a user's metric, see `Metric`.
        """
        for node in self._on_samples:
            if node.at_end is not None:
                node.at_end()
        drawn = [scores.without_baselines(result.batch) for result in samples.draws]
        ended = scores.one_row_per_episode(drawn[0])
        record: dict[str, Any] = scores.score_metrics(ended)
        if "rollout" in samples.draws[0].timings:
            record |= _rollout_metrics(samples.draws, drawn)
            if "episode" in drawn[0]:
                record |= scores.episode_metrics(Batch.concat(drawn))
        if samples.rejected is not None:
            record["rollout/resamples"] = scores.Count(len(samples.draws) - 1)
            record["rollout/rejected_prompts"] = scores.Count(samples.rejected)
        of_nodes = combined([(len(result.batch), result.metrics) for result in samples.draws])
        record = disjoint("a metric of a node", record, of_nodes)
        users = {name: metric(ended, self._run.deadline)[0] for name, metric in self.metrics.items()}
        add_metrics(record, users, self.metrics)
        return record

    def _check_episodes(self, samples: Batch) -> None:
        """Count episodes that failed; see `collect`."""
        ended = scores.one_row_per_episode(scores.without_baselines(samples))
        errors = ended["episode_error"]
        latest = next((error for error in reversed(errors) if error is not None), None)
        reasons = Counter(filter(None, scores.left_out_words(ended)))
        if sum(reasons.values()) > self._max_left_out * len(errors):
            counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            raise RolloutError(
                f"{sum(reasons.values())} of {len(errors)} episodes of this step are left out ({counts}; latest: "
                f"{latest or 'no reward'}), more than max_left_out={self._max_left_out:g} of them: mend the agent, or "
                "raise it"
            )
        if too_many := self.episodes.add(error is not None for error in errors):
            raise RolloutError(
                f"the episode failed on {too_many} (latest: {latest or 'earlier'}). Mend it, raise its deadline, "
                "or raise max_failed_episodes (in settings reward.max_failure_rate)"
            )

    async def _kept(self, samples: Batch) -> Batch:
        """The samples that the algorithm does not reject; `samples` itself where it rejects none."""
        if type(self.algorithm).keep is BaseAlgorithm.keep:
            return samples
        # In the compute thread: it may be a user's.
        keep = await asyncio.wrap_future(submit(self.algorithm.keep, samples).result)
        return samples if keep is None else samples.filter(keep)


def _rollout_metrics(draws: Sequence[Result], drawn: Sequence[Batch]) -> dict[str, Any]:
    """Lengths and KL of the first rollout, which has every prompt once; tokens, time, abstentions, failures and
    rejections of all. `drawn`: their samples without baselines."""
    first, ended = drawn[0], [*map(scores.one_row_per_episode, drawn)]
    generated = sum(scores.written_tokens(result.batch) for result in draws)
    busy = sum(result.timings["rollout"].busy for result in draws)
    metrics = {
        **scores.sample_metrics(first),
        "rollout/tokens": scores.Count(generated),
        "rollout/tokens_per_s": generated / max(busy, 1e-9),
        "time/rollout": scores.Seconds(busy),
    }
    if "ref_log_probs" in first:
        metrics["kl"] = kl_to_reference(first)
    if "reward" in first:
        metrics["reward/abstained"] = scores.Count(sum(samples["reward"].count(None) for samples in ended))
    if "rejected" in first:
        failed = sum(error is not None for samples in ended for error in samples["episode_error"])
        tried = sum(sum(samples["rejected"]) + len(samples) for samples in ended) - failed
        complete = sum(finish in ("stop", "length") for samples in ended for finish in samples["finish"])
        metrics["rollout/rejection_rate"] = 1 - complete / max(tried, 1)
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


def check_reads(data: Mapping[str, Batch], sources: Iterable[RewardSource], metrics: Iterable[Metric] = ()) -> None:
    """Raises DataError if the rows of one of some data, by their names, lack what a reward or a metric reads, or have
    a name in a column that none knows."""
    asked: list[Any] = [part for source in sources for part in {id(p): p for p in (source, *leaves(source))}.values()]
    asked += [metric.by_row for metric in metrics if metric.by_row is not None]
    checks: list[Callable[..., None]] = [leaf.check_data for leaf in asked if hasattr(leaf, "check_data")]
    for name, batch in data.items():
        for check in (part.check_values for part in asked if hasattr(part, "check_values")):
            check(name, batch)
        rows = list(islice(batch.rows(), _ROWS))
        for check in checks if rows else ():
            try:
                check(rows)
            except RewardError as error:
                raise DataError(f"{name}: {error}") from error
