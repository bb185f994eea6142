"""The trainer: the one-step graph of an algorithm, run again and again, watched, logged and saved.

A step is two runs of one graph: experience (rollout, rewards, reference log-probs, values), then learning
(prepare, update of every model). Between them stands the buffer, and the choice of samples by algorithms that reject
some. The trainer never asks which algorithm it runs; what it must know stands on the algorithm's contract.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, get_args

from verl.algorithms import BaseAlgorithm, make_algorithm
from verl.batch import Batch
from verl.controller.ranks import is_main
from verl.data.buffers import Buffer
from verl.data.prefetch import Loader
from verl.dataflow.executor import Result, run_graph
from verl.dataflow.graph import Graph, Node
from verl.dataflow.nodes import experience_nodes, patient, reward_node, rollout_node, update_nodes
from verl.errors import CheckpointError, ConfigError, DataError, RolloutError, TrainingError
from verl.models.memory import peak_memory
from verl.rewards.failures import Failures
from verl.roles.actor import Actor
from verl.roles.critic import Critic
from verl.roles.reward import Reward
from verl.roles.updater import Updater
from verl.rollout.base import SamplingParams, as_sampling
from verl.trainer import state
from verl.trainer.check import check_permuted
from verl.trainer.checkpoint import Checkpoint, CheckpointStore
from verl.trainer.evaluation import Evaluation, MetricFn, evaluate
from verl.trainer.logging import Logger, default_logger, follow_log_level
from verl.trainer.samples import (
    kl_to_reference,
    own_samples,
    permuted,
    rejected_rows,
    renamed,
    retried_groups,
    sample_names,
    score_metrics,
)
from verl.trainer.shared_buffer import open_buffer
from verl.trainer.timeline import Span, Timeline, busy_shares, spans_of
from verl.training.options import Strategy

logger = logging.getLogger(__name__)

_UNBOUNDED = 2**62


class Trainer:
    """Trains an actor on prompts by any algorithm.

    Args:
        actor: the policy, or a model, or the name or directory of one.
        critic: the value model, likewise; None: made from the actor's where the algorithm has one.
        reward: a `Reward`, or anything `Reward` takes. `reward_fn=` is the same. None for algorithms without one.
        cost: likewise, what the algorithm keeps below a limit; for algorithms with that role.
        algorithm: a name, class or instance; None: the default of `make_algorithm`.
        n: samples a prompt; None: what suits the algorithm (`BaseAlgorithm.samples_per_prompt`).
        buffer: "memory", "disk", "distributed" (shared on a Ray cluster), or an instance.
        buffer_size: its capacity, in samples that wait; None: unbounded.
        buffer_dir: where a disk buffer lies; the name of a distributed one.
        update_freq: an update each time so many new samples have arrived; None: every step.
        use_amp: of actor and critic, see `Actor`; None: as they say.
        max_resamples: further rollouts in one step for prompts whose samples the algorithm rejects.
        max_skipped_updates: updates in a row that may be skipped for non-finite numbers before the run ends.
        max_failed_episodes: share of the latest 256 samples, once there are 64, whose episode may fail before it ends.
        log_dir: where TensorBoard events and `metrics.jsonl` go; None: `runs/<algorithm>-<time>`; False: nowhere.
        on_log_hook: `fn(step, record)` gets every log record.
        checkpoint_dir, save_every: automatic checkpoints, by both together; a disk that does not take one is a warning.
        keep_checkpoints: how many `step-<number>` stay in that directory, the newest; None: all.
        permute_rewards: a control: rewards are dealt out at random among the samples, so nothing can be learned.
        placement: where every role runs, by one map, see `DeviceMesh`; None: where the handles say. `device_map=`
            is the same.
        strategy: how the ranks of a model share its training, "ddp" or "fsdp", for all models; or a map of placement.
        timeline: where a trace of what worked when is written; see `Timeline`.
        deadline: seconds for one call of a node, and for ranks to wait for each other.
        **options: of the algorithm, such as `kl_coef`.

    Raises:
        ConfigError: an unknown algorithm or option; a reward or cost that is missing, or that the algorithm has not; a
            count below 1; an `update_freq` that the buffer never holds; actor or critic have workers already that were
            told otherwise.
    """

    algorithm_name: ClassVar[str | None] = None

    def __init__(
        self,
        actor: Actor | Any,
        critic: Critic | Any = None,
        reward: Any = None,
        *,
        reward_fn: Any = None,
        cost: Any = None,
        algorithm: str | BaseAlgorithm | None = None,
        n: int | None = None,
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        buffer: str | Buffer = "memory",
        buffer_size: int | None = None,
        buffer_dir: str | Path = "buffer",
        update_freq: int | None = None,
        use_amp: bool | None = None,
        max_resamples: int = 4,
        max_skipped_updates: int = 5,
        max_failed_episodes: float = 0.5,
        log_dir: str | Path | bool | None = None,
        logger: Logger | None = None,
        on_log_hook: Callable[[int, dict[str, Any]], None] | None = None,
        checkpoint_dir: str | Path | None = None,
        save_every: int | None = None,
        keep_checkpoints: int | None = None,
        permute_rewards: bool = False,
        placement: Any = None,
        strategy: Any = None,
        device_map: Any = None,
        timeline: str | Path | None = None,
        deadline: float = 1800.0,
        **options: Any,
    ) -> None:
        follow_log_level()
        self.algorithm = make_algorithm(algorithm or self.algorithm_name, **options)
        if reward is not None and reward_fn is not None:
            raise ConfigError("give the trainer one reward: reward=... or reward_fn=...")
        given = {"reward": reward_fn if reward is None else reward, "cost": cost}
        #: Role -> where its numbers come from, for those of reward and cost that the algorithm has.
        self.sources = {role: _source(role, source, self.algorithm) for role, source in given.items() if source}
        if self.algorithm.online and (lacking := {"reward", "cost"} & self.algorithm.roles - self.sources.keys()):
            role = max(lacking)
            raise ConfigError(f"algorithm '{self.algorithm.name}' needs a {role}: give the trainer {role}=...")
        if permute_rewards:
            check_permuted(self.algorithm)
        layout = strategy if strategy in get_args(Strategy) else None
        maps = [given for given in (placement, None if layout else strategy, device_map) if given is not None]
        if len(maps) > 1:
            raise ConfigError("give the trainer one map: placement=..., strategy=... or device_map=...")
        if (checkpoint_dir is None) != (save_every is None):
            raise ConfigError(
                "automatic checkpoints need both checkpoint_dir=... and save_every=..., where and how often: give the "
                "other too, or call save_checkpoint(path) yourself"
            )
        if keep_checkpoints is not None and save_every is None:
            raise ConfigError("keep_checkpoints is of automatic checkpoints: give checkpoint_dir= and save_every=")
        _check_counts(
            1,
            n=n,
            buffer_size=buffer_size,
            update_freq=update_freq,
            save_every=save_every,
            keep_checkpoints=keep_checkpoints,
            max_skipped_updates=max_skipped_updates,
        )
        _check_counts(0, max_resamples=max_resamples)
        self.actor = actor if isinstance(actor, Actor) else Actor(actor, head=self.algorithm.head)
        if critic is not None and not isinstance(critic, Critic):
            critic = Critic.from_pretrained(critic) if isinstance(critic, str) else Critic(critic)
        handles: list[Actor | Critic] = [self.actor] if critic is None else [self.actor, critic]
        changes: dict[str, Any] = {} if layout is None else {"strategy": layout}
        changes |= {} if use_amp is None else {"use_amp": use_amp}
        for handle in handles:
            if maps:
                handle.place(maps[0])
            handle.train_with(**changes)
        self.updater = Updater(self.algorithm, actor=self.actor, critic=critic)
        self.critic = self.updater.critics.get("critic")
        self.deadline = deadline
        self._controllers = {self.actor.controller, *(c.controller for c in self.updater.critics.values())}
        for controller in self._controllers:
            controller.wait(deadline)
        self.n = self.algorithm.samples_per_prompt if n is None else n
        self.algorithm.check_samples(self.n)
        self.sampling = as_sampling(sampling, self.actor.sampling)
        if self.algorithm.online:  # log-probs are of logits at the temperature that samples are drawn at
            self.actor.plan = replace(self.actor.plan, temperature=self.sampling.temperature or 1.0)
        _warn_of_masks(self.actor, self.sampling)
        self.update_freq = update_freq
        self.buffer = open_buffer(buffer, _UNBOUNDED if buffer_size is None else buffer_size, buffer_dir)
        if (update_freq or 1) > self.buffer.capacity:
            raise ConfigError(
                f"update_freq is the number of new samples that an update waits for, at most what the buffer holds "
                f"({self.buffer.capacity}), not {update_freq}"
            )
        #: Names of samples that have waited since before the first step, which calls its own alike.
        self._former: set[str] | None = None
        self.max_resamples = max_resamples
        self.max_skipped_updates = max_skipped_updates
        self.permute_rewards = permute_rewards
        self.checkpoint_dir = checkpoint_dir
        self.save_every = save_every
        self.keep_checkpoints = keep_checkpoints
        self.timeline = None if timeline is None else Timeline(timeline)
        #: What worked when, since the present step began.
        self.spans: list[Span] = []
        self.steps = 0
        #: Where `fit` takes its prompts from; and where a loaded checkpoint's loader was, for the next `fit`.
        self.loader: Loader | None = None
        self.place: dict[str, Any] | None = None
        self.skipped = 0
        self.episodes = Failures(max_failed_episodes)
        self.metric_fns: dict[str, Callable[[Batch], float]] = {}
        self._log_dir = log_dir
        self._logger: Logger | None = None
        self._hooks = [on_log_hook] if on_log_hook else []
        if logger is not None:
            self.use_logger(logger)
        self.experience_graph = Graph(self._patient(self._experience()))
        self.learning_graph = Graph(self._patient(update_nodes("update", self.updater)))

    @property
    def graph(self) -> Graph:
        """The whole step as one graph, to look at or compare."""
        nodes = [*self.experience_graph.nodes.values(), *self.learning_graph.nodes.values()]
        return Graph(nodes, self.experience_graph.inputs)

    @property
    def logger(self) -> Logger:
        if self._logger is None:
            self.use_logger(default_logger(self._log_dir, self.algorithm.name))
        assert self._logger is not None
        return self._logger

    def use_logger(self, logger: Logger) -> None:
        """Log to `logger` from now on, hooks included."""
        for hook in self._hooks:
            logger.on_log_hook(hook)
        self._logger = logger

    def on_log_hook(self, fn: Callable[[int, dict[str, Any]], None]) -> None:
        """`fn(step, record)` gets every log record from now on."""
        self._hooks.append(fn)
        if self._logger is not None:
            self._logger.on_log_hook(fn)

    def add_metric(self, name: str, fn: Callable[[Batch], float]) -> None:
        """Log `fn(samples)` of each step's samples under `name`."""
        self.metric_fns[name] = fn

    def step(self, prompts: Any) -> dict[str, Any]:
        """One step: sample, score, and (unless `update_freq` says to wait) update every model.

        Args:
            prompts: strings, chats, token ids, mappings or a `Batch`; see `Actor.prompts`. A batch that has
                `response_tokens` (of an `OfflineDatasetLoader`) is learned from as it is: nothing is sampled.

        Returns:
            The log record: `reward` (mean of the step's samples, a float; NaN if all abstained), `reward/mean`,
            `loss/actor`, `loss/critic`, `kl` (where one is measured), `updated`, and more.

        Raises:
            TrainingError: too many updates in a row were not finite.
            RewardError, RolloutError: too many of the latest rewards or episodes failed.
        """
        began = time.perf_counter()
        self.spans.clear()
        batch = self.actor.prompts(prompts, key=f"s{self.steps}")
        samples, record = self.recall(batch) if "response_tokens" in batch else self.collect(batch)
        if self._former is None:
            self._former = sample_names(self.buffer.state())
        samples = renamed(samples, self._former)
        wanted = self.update_freq or 1
        # What an update takes at once needs no room to wait in.
        overflow = len(samples) > self.buffer.room and len(self.buffer) + len(samples) >= wanted
        if not overflow:
            self.buffer.add(samples)
        record["updated"] = due = overflow or len(self.buffer) >= wanted
        if due:
            waiting, self._former = self.buffer.drain(), set()
            record.update(self.learn(Batch.concat([waiting, samples]) if overflow else waiting))
            record["updated"] = "update/empty" not in record
            # Without a reference the KL is that of the update's policy to the one that sampled.
            if "ref_log_probs" not in samples and "policy/kl" in record:
                record["kl"] = record["policy/kl"]
        return self._conclude(record, began)

    def _conclude(self, record: dict[str, Any], began: float) -> dict[str, Any]:
        """What every step ends with: its time, its log record, a checkpoint where one is due."""
        record["time/step"] = time.perf_counter() - began
        record.update(busy_shares(self.spans, record["time/step"]))
        record["memory/peak_gb"] = peak_memory() / 1e9
        self.steps += 1
        logger.debug("step %d: %s", self.steps, ", ".join(f"{name}={value}" for name, value in record.items()))
        self.logger.log(self.steps, record)
        if self.save_every and self.checkpoint_dir and self.steps % self.save_every == 0:
            self._save_automatically(Path(self.checkpoint_dir))
        return record

    def _save_automatically(self, directory: Path) -> None:
        result = state.save(self, directory / f"step-{self.steps:06d}")
        if not result:
            logger.warning("%s; training goes on, earlier checkpoints are untouched", result.error)
        elif self.keep_checkpoints is not None and is_main():
            CheckpointStore(directory, self.keep_checkpoints).prune(self.steps)

    def fit(self, prompts: Iterable[Any], steps: int) -> dict[str, Any]:
        """`steps` steps over batches of prompts: those of a loader, a list or any other iterable; the last record.

        A loader's place (`state_dict`, `load_state_dict`) is in the checkpoints that are saved from now on; after
        `load_checkpoint` a loader over the same data goes on there.

        Raises:
            DataError: there are fewer batches than steps.
        """
        record: dict[str, Any] = {}
        self.loader = prompts if isinstance(prompts, Loader) else None
        if self.place is not None and self.loader is not None:
            self._go_on(self.loader, self.place)
        self.place = None
        batches = iter(prompts)
        for _ in range(steps):
            record = self.advance(batches)
        return record

    def advance(self, prompts: Iterator[Any]) -> dict[str, Any]:
        """One step on the next batch of prompts.

        Raises:
            DataError: there is none.
        """
        try:
            batch = next(prompts)
        except StopIteration:
            raise self._no_prompts() from None
        return self.step(batch)

    def _go_on(self, loader: Loader, place: dict[str, Any]) -> None:
        try:
            loader.load_state_dict(place)
        except Exception as error:  # of whatever loader the user has
            logger.warning("the checkpoint was saved over other prompts, so these begin where they are: %s", error)

    def _no_prompts(self) -> DataError:
        return DataError(
            f"the batches of prompts ended after {self.steps} steps: give as many as there are steps, or a loader "
            "without end, such as verl.data.loader.PromptLoader"
        )

    def close(self) -> None:
        """End what the trainer has started besides itself; the next step starts it anew."""
        for source in self.sources.values():
            source.close()

    def check_failures(self) -> None:
        """For the end of a run: raises RewardError or RolloutError if all rewards, or all episodes, have failed so far,
        too few for the bounds that hold in between."""
        if self.episodes.all:
            raise RolloutError("every episode failed (the warnings say why), so nothing was learned: mend it")
        for source in self.sources.values():
            source.check_failures()

    def extra_files(self) -> dict[str, Any]:
        """What a kind of trainer adds to a checkpoint."""
        return {}

    def load_extra_files(self, checkpoint: Checkpoint) -> None:
        """Restores `extra_files`, which have passed `check_extra_files`."""

    def check_extra_files(self, checkpoint: Checkpoint) -> None:
        """Look at `extra_files` before anything is restored.

        Raises:
            DamagedCheckpointError: one does not pass its schema.
            CheckpointError: it is another kind of trainer's, and has what would be lost.
        """
        files = [name for name in ("waiting.parquet", "ready.parquet") if name in checkpoint]
        if any(len(checkpoint.batch(name)) for name in files):
            raise CheckpointError(
                f"{checkpoint.path} is of asynchronous training, with prompts and samples on their way that a "
                "synchronous trainer would lose: go on with AsyncTrainer (trainer.max_staleness)"
            )

    def collect(self, prompts: Batch) -> tuple[Batch, dict[str, Any]]:
        """Experience for a batch of prompts, and what it measured.

        Prompts whose samples the algorithm rejects are sampled again, at most `max_resamples` times; after that
        the step goes on with what there is.
        """
        if not self.algorithm.online:
            raise DataError(
                f"algorithm '{self.algorithm.name}' learns from recorded responses and this batch has none: "
                "give batches of an OfflineDatasetLoader made with the actor's tokenizer"
            )
        result = self._run(self.experience_graph, prompts)
        record = self._rollout_metrics(result)
        keep = self.algorithm.keep(result.batch)
        if keep is None:
            return result.batch, record
        kept, rounds = [result.batch.filter(keep)], 0
        origin = {group: group for group in prompts["group"]}
        while (again := rejected_rows(prompts, kept, origin)) and rounds < self.max_resamples:
            rounds += 1
            retry = prompts.take(again)
            retries = retry.drop(["group", "id"]).add({"group": retried_groups(retry["group"], rounds, origin)})
            more = self._run(self.experience_graph, retries).batch
            kept.append(more.filter(self.algorithm.keep(more) or [True] * len(more)))
        record["rollout/resamples"] = rounds
        record["rollout/rejected_prompts"] = len(again)
        return Batch.concat(kept), record

    def recall(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        """Experience from recorded responses: the graph of `collect` without a rollout, and without the nodes whose
        column has been recorded."""
        batch = self.algorithm.extend(batch)
        if "id" not in batch:
            batch = batch.add({"id": [f"s{self.steps}.{row}" for row in range(len(batch))]})
        nodes = [n for n in self._experience() if n.kind != "source" and not set(n.outputs) & set(batch.columns)]
        # The temperature that samples were drawn at, where it is not the actor's own.
        own = ("temperature",) if "temperature" in batch else ()
        nodes = [replace(n, inputs=(*n.inputs, *own)) if "ref_log_probs" in n.outputs else n for n in nodes]
        result = self._run(Graph(self._patient(nodes), batch.columns), batch)
        return result.batch, {**score_metrics(own_samples(result.batch)), **result.metrics}

    def learn(self, samples: Batch) -> dict[str, Any]:
        """Update every model from scored samples."""
        if self.permute_rewards:
            samples = permuted(samples, seed=self.steps)
        result = self._run(self.learning_graph, samples)
        metrics: dict[str, Any] = dict(result.metrics)
        updates = [timing.busy for name, timing in result.timings.items() if name != "prepare"]
        if len(updates) == sum(name.startswith("update/empty/") for name in metrics):  # of each model, or there is none
            return {**metrics, "update/empty": 1.0}
        seconds = sum(updates)
        trained = sum(own_samples(samples).lengths("response_tokens"))
        metrics["train/tokens"] = trained
        metrics["train/tokens_per_s"] = trained / max(seconds, 1e-9)
        metrics["time/update"] = seconds
        self._watch(metrics)
        return metrics

    def evaluate(
        self,
        prompts: Any,
        metrics: Mapping[str, MetricFn] | None = None,
        *,
        n: int = 1,
        temperature: float = 0.0,
    ) -> Evaluation:
        """Sample and score held-out prompts; nothing is learned.

        Args:
            metrics: your own, by name: from scored samples to one number a row, or one for all.
            n: samples a prompt.
            temperature: 0 is greedy.
        """
        if "reward" not in self.sources:
            raise ConfigError("samples are scored by a reward, and this trainer has none: see evaluate_loss")
        problems = self.actor.prompts(prompts, key="eval")
        if "id" in problems:  # a loader names visits, not problems
            problems = problems.drop(["id", "group"]).add({"group": [f"eval.{i}" for i in range(len(problems))]})
        params = replace(self.sampling, temperature=temperature)
        graph = Graph(self._patient([rollout_node("rollout", self.actor, n=n, params=params)]))
        reward = self.sources["reward"]
        state_before = reward.state_dict()
        try:
            return evaluate(problems, lambda rows: self._run(graph, rows).batch, reward.get_reward, metrics)
        finally:
            reward.load_state_dict(state_before)

    def evaluate_loss(self, batch: Batch) -> dict[str, float]:
        """Loss and metrics of an update (such as preference accuracy) on recorded rows; nothing is learned."""
        state_before = self.algorithm.state_dict()
        try:
            prepared, metrics = self.updater.prepare(self.recall(batch)[0])
        finally:
            self.algorithm.load_state_dict(state_before)
        return {**metrics, **self.actor.compute_loss(prepared, self.algorithm)}

    def save_checkpoint(self, path: str | Path) -> None:
        """Write everything an exact resume needs to a directory, whole or not at all.

        Raises:
            CheckpointError: the disk did not take it, or what is at `path` is no checkpoint; it is untouched.
        """
        result = state.save(self, Path(path))
        if not result:
            raise CheckpointError(
                f"{result.error}; what was there before is untouched: free space or name another place, and save again"
            )

    def load_checkpoint(self, path: str | Path) -> None:
        """Go on exactly from what `save_checkpoint` wrote.

        Raises:
            CheckpointError: the checkpoint is damaged, or belongs to another model or algorithm.
        """
        state.load(self, Path(path))

    def _patient(self, nodes: list[Node]) -> list[Node]:
        return patient(nodes, self._controllers, self.deadline)

    def _run(self, graph: Graph, batch: Batch) -> Result:
        result = run_graph(graph, batch, deadline=self.deadline)
        self._note(spans_of(graph, result))
        return result

    def _note(self, spans: list[Span]) -> None:
        self.spans += spans
        for span in spans:
            logger.debug("step %d: %s (%s) took %.3f s", self.steps + 1, span.node, span.role, span.seconds)
        if self.timeline is not None:
            self.timeline.add(spans, self.steps + 1)

    def _experience(self) -> list[Node]:
        nodes = [reward_node(role, source, role) for role, source in self.sources.items()]
        nodes += experience_nodes(self.updater)
        if not self.algorithm.online:
            return nodes
        baseline = self.algorithm.greedy_baseline
        return [rollout_node("rollout", self.actor, n=self.n, params=self.sampling, greedy_baseline=baseline), *nodes]

    def _rollout_metrics(self, result: Result) -> dict[str, Any]:
        generated = int(result.batch.tensor("response_mask").sum())  # what tools wrote is not
        batch = own_samples(result.batch)
        lengths = batch.lengths("response_tokens")
        busy = result.timings["rollout"].busy
        record: dict[str, Any] = {
            **score_metrics(batch),
            "response/length": sum(lengths) / max(len(lengths), 1),
            "response/cut": sum(f == "length" for f in batch["finish"]) / max(len(batch), 1),
            "rollout/tokens": generated,
            "rollout/tokens_per_s": generated / max(busy, 1e-9),
            "time/rollout": busy,
            **({"kl": kl_to_reference(batch)} if "ref_log_probs" in batch else {}),
            **result.metrics,
        }
        if "rejected" in batch:
            failed = self._count_episodes(batch["episode_error"])
            drawn = sum(batch["rejected"]) + len(batch) - failed
            kept = sum(end in ("stop", "length") for end in batch["finish"])
            record["rollout/rejection_rate"] = 1 - kept / max(drawn, 1)
            record["rollout/failed_episodes"] = failed
        return {**record, **self._own_metrics(batch)}

    def _own_metrics(self, samples: Batch) -> dict[str, float]:
        """What the user's functions say of the policy's samples.

        Raises:
            DataError: one says no number.
        """
        samples, found = own_samples(samples), {}
        for name, fn in self.metric_fns.items():
            value: Any = fn(samples)
            try:
                found[name] = float(value)
            except (TypeError, ValueError):
                raise DataError(f"metric '{name}' returned {value!r}: give one number for all samples") from None
        return found

    def _count_episodes(self, errors: list[str | None]) -> int:
        told = [error for error in errors if error is not None]
        self.episodes.add(error is not None for error in errors)
        if self.episodes.too_many:
            raise RolloutError(
                f"the episode failed on {self.episodes} (latest: {told[-1] if told else 'earlier'}). Mend it, raise "
                "its deadline, or raise max_failed_episodes (in settings reward.max_failure_rate)"
            )
        return len(told)

    def _watch(self, metrics: Mapping[str, Any]) -> None:
        skipped = sum(value for name, value in metrics.items() if name.startswith("update/skipped"))
        self.skipped = self.skipped + 1 if skipped else 0
        if self.skipped >= self.max_skipped_updates:
            raise TrainingError(
                f"{self.skipped} updates in a row had a loss or gradient that is not finite (step {self.steps + 1}): "
                "lower the learning rate, look at the rewards, or train in float32"
            )


class PPOTrainer(Trainer):
    """`Trainer` with PPO: `PPOTrainer(actor=actor, reward_fn=f)` makes its own critic."""

    algorithm_name = "ppo"


def _source(role: str, source: Any, algorithm: BaseAlgorithm) -> Reward:
    if role not in algorithm.roles:
        raise ConfigError(f"algorithm '{algorithm.name}' has no {role}: leave {role}=... out")
    return source if isinstance(source, Reward) else Reward(source)


def _check_counts(least: int, **counts: Any) -> None:
    """Raises ConfigError for a count that is given and is no whole number of at least `least`."""
    for name, count in counts.items():
        if count is not None and (isinstance(count, bool) or not isinstance(count, Integral) or count < least):
            raise ConfigError(f"{name} must be a whole number of at least {least}, not {count!r}")


def _warn_of_masks(actor: Actor, sampling: SamplingParams) -> None:
    masks = {"top_k": sampling.top_k > 0, "top_p": sampling.top_p < 1, "min_p": sampling.min_p > 0}
    if on := [*(name for name, is_on in masks.items() if is_on), *(["a grammar"] if actor.masks else [])]:
        logger.warning(
            "%s: samples come from the masked policy, log-probs are those of the policy without the mask, so the "
            "gradient is biased by as much as the mask takes away",
            ", ".join(on),
        )
