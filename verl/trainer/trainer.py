"""`Trainer`: samples and trains (`verl.trainer.step`); between the two, the buffer and the choice of samples.

The trainer never asks which algorithm it runs: the algorithm's contract says what differs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from verl._base.checked import checked, validated
from verl._base.names import check_known, disjoint
from verl._base.record import AtOnce, Natural, Portion
from verl.algorithms import BaseAlgorithm
from verl.batch import Batch
from verl.checkpoint.directory import AutomaticCheckpoints
from verl.data.buffers import Buffer, MemoryBuffer, make_buffer
from verl.data.loader import note_scores, sources_of
from verl.data.prompts import PromptDataset
from verl.dataflow.executor import all_of
from verl.dataflow.graph import Graph
from verl.dataflow.loop import run_sync
from verl.dataflow.nodes import UpdateNode
from verl.dataflow.scores import without_baselines
from verl.errors import ConfigError, RolloutError
from verl.report.completions import completions
from verl.report.metrics import Metric, MetricFn, add_metrics
from verl.report.samples import permuted, renamed, sample_names
from verl.report.timeline import busy_shares
from verl.rewards.failures import Failures
from verl.roles.actor import Actor
from verl.roles.critic import Critic
from verl.roles.layouts import by_workers, enable_hybrid_engine, lay_out
from verl.roles.reward import Reward
from verl.roles.updater import Updater
from verl.rollout.base import SamplingParams
from verl.rollout.options import Temperature
from verl.trainer.evaluation import Evaluation, HeldOut, Metrics, named_metrics, together
from verl.trainer.guard import SafetyGuard
from verl.trainer.loop import Loop, check_finite, skipped_roles
from verl.trainer.options import OTHERS, BufferOptions, CheckpointOptions, LimitOptions, LoggingOptions, TrainerOptions
from verl.trainer.runner import Run
from verl.trainer.step import learn
from verl.trainer.task import Samples, Task
from verl.trainer.tasks import Mixture, check_permuted, critics_of, joined, tasks_of
from verl.weights.layout import Mesh
from verl.workers.actor import ActorWorker

if TYPE_CHECKING:
    from verl.keywords import TrainerKeywords

logger = logging.getLogger(__name__)


def _of_the_task(name: str) -> Any:
    return property(attrgetter(f"task.{name}"), doc=f"`{name}` of the only task.")


class Trainer(Loop):
    """Trains an actor on prompts by any algorithm.

    Args:
        actor: the policy, or a model, or the name or directory of one.
        critic: the value model, likewise; None: made from the actor's where the algorithm has one.
        reward: a `Reward`, or anything `Reward` takes; None for algorithms without one.
        algorithm, n, sampling, nodes: see `Task`.
        tasks: a list of `Task`s, instead of reward, cost, algorithm, n, sampling and nodes. Several train the one actor
            together: see `step`.
        held_out: what `fit` evaluates before its first step, at intervals, and after its last.
        placement: the placement of all roles, see `DeviceMesh`, or `PlacementOptions`; None: where the handles say.
        buffer: where samples wait: "memory", "disk", "distributed" (shared on a Ray cluster), an instance, or
            `BufferOptions`.
        checkpoints: automatic checkpoints, `CheckpointOptions` or a mapping of its fields; likewise
        logging, limits: `LoggingOptions`, `LimitOptions`.
        **keywords: fields of these records by their own names (`save_every=10`, `log_dir=...`, `update_freq=...`,
            `strategy=...`), and

            - `reward_fn`: the reward by another name
            - `cost`: what the algorithm keeps below a limit, as `reward`; for algorithms with that role
            - `environment`: a class of TRL's form, whose public methods are tools and whose `get_reward` is a reward
              besides `reward`; a mapping of names to these; or an `EnvironmentEpisode`, which has options
            - `config_path`: a YAML file of tasks, instead of `tasks`; see `TaskConfig`
            - `dataloader`: what `train` goes over
            - `permute_rewards`: a control: rewards are shuffled among the samples, so nothing can be learned
            - `skip_zero_advantage_rows`: rows whose gradient is known to be 0 are not computed in updates (True)
            - options of the algorithm, such as `kl_coef`

    Raises:
        ConfigError: an unknown algorithm or option; a reward or cost that is missing, or that the algorithm has not; a
            count below 1; an `update_freq` that the buffer never holds; actor or critic have workers already with
            other settings.
    """

    algorithm_name: ClassVar[str | None] = None
    algorithm: BaseAlgorithm = _of_the_task("algorithm")
    sources: dict[str, Reward] = _of_the_task("sources")
    updater: Updater = _of_the_task("updater")
    critic: Critic | None = _of_the_task("critic")
    sampling: SamplingParams = _of_the_task("sampling")
    episodes: Failures = _of_the_task("episodes")
    n: int = _of_the_task("n")

    @checked
    def __init__(
        self,
        actor: Actor | Any,
        critic: Critic | Any = None,
        reward: Any = None,
        *,
        algorithm: str | BaseAlgorithm | None = None,
        tasks: Sequence[Task] | None = None,
        n: AtOnce | None = None,
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        nodes: Mapping[str, Any] | Iterable[str] = (),
        held_out: HeldOut | None = None,
        placement: Any = None,
        buffer: str | Buffer | BufferOptions = "memory",
        checkpoints: CheckpointOptions | Mapping[str, Any] | None = None,
        logging: LoggingOptions | Mapping[str, Any] | None = None,
        limits: LimitOptions | Mapping[str, Any] | None = None,
        **keywords: Unpack[TrainerKeywords],
    ) -> None:
        rest: dict[str, Any] = {**keywords}
        options = TrainerOptions.spread(
            rest, placement=placement, buffer=buffer, checkpoints=checkpoints, logging=logging, limits=limits
        )
        of_tasks = validated("Trainer", OTHERS, {name: rest.pop(name) for name in OTHERS if name in rest})
        dataloader = of_tasks.pop("dataloader", None)
        permute_rewards = of_tasks.pop("permute_rewards", False)
        skip_zero_advantage_rows = of_tasks.pop("skip_zero_advantage_rows", True)
        of_tasks |= {"reward": reward, "n": n, "sampling": sampling, "nodes": nodes, "actor": actor}
        tasks = tasks_of(rest, algorithm=algorithm or self.algorithm_name, tasks=tasks, **of_tasks)
        if permute_rewards:
            for task in tasks:
                check_permuted(task.algorithm)
        super().__init__(options, dataloader, held_out, tasks[0].algorithm.name)
        self.actor = actor if isinstance(actor, Actor) else Actor(actor, head=tasks[0].algorithm.head)
        self._make_tasks(tasks, critic, options)
        for handle in self.roles.values():
            handle.plan = replace(handle.plan, skip_zero_advantage_rows=skip_zero_advantage_rows)
        self._permute = permute_rewards
        #: The samples of the latest update by task, and the same as `prepare` left them.
        self.latest: tuple[Mapping[str, Batch], Mapping[str, Batch]] | None = None
        self.mixture = Mixture(self.tasks)
        #: The user's metrics, as a record names them.
        self._metrics: set[str] = set()
        self._make_buffer(options.buffer)
        if held_out is not None and held_out.kl:
            self.actor.make_reference()

    def _make_buffer(self, options: BufferOptions) -> None:
        if options.buffer != "memory":  # it lies outside of the process, and belongs to the driver
            self.actor.controller.start()
        size, self._update_freq = options.buffer_size, options.update_freq
        self.buffer = make_buffer(options.buffer, 2**62 if size is None else size, options.buffer_dir)
        if (self._update_freq or 1) > self.buffer.capacity:
            raise ConfigError(
                f"update_freq is the number of new samples that an update waits for, at most what the buffer holds "
                f"({self.buffer.capacity}), not {self._update_freq}"
            )
        #: Names of samples that have waited since before the first step, which calls its own alike.
        self._former: set[str] | None = None

    def _make_tasks(self, tasks: Sequence[Task], critic: Any, options: TrainerOptions) -> None:
        """Lay the models out over their ranks, and bind each task to them."""
        waiting, limits, layout = options.buffer, options.limits, options.placement
        names = {task.name: f"task/{task.name}" if len(tasks) > 1 else "" for task in tasks}
        if any(names.values()) and (waiting.update_freq, waiting.buffer, waiting.buffer_size) != (None, "memory", None):
            raise ConfigError(
                "several tasks update in every step: leave buffer, buffer_size and update_freq out of the trainer"
            )
        critics = critics_of(tasks, critic)
        models: list[Actor | Critic] = [self.actor, *(critic for critic in critics.values() if critic is not None)]
        by_number = by_workers(layout.num_rollout_workers, layout.num_update_workers)
        lay_out(models, (layout.placement, layout.device_map, by_number), layout.strategy, layout.use_amp)
        self.runner = Run(deadline=limits.deadline, timeline=options.logging.timeline)
        self.tasks = {task.name: copy(task) for task in tasks}
        for name, task in self.tasks.items():
            task.bind(self.actor, critics[name], self.runner, limits, names[name])
        #: The models that are trained: the actor, and the critics; of several tasks, each with its task's name.
        self.roles = {"actor": self.actor} | {
            f"{role}-{name}" if task.updater.name else role: critic
            for name, task in self.tasks.items()
            for role, critic in task.updater.critics.items()
        }
        for task in tasks:
            for role, source in task.sources.items():
                source.set_placement(self.actor.controller, role)
                source.set_seed(self.actor.plan.seed)
        for controller in {handle.controller for handle in self.roles.values()}:
            controller.wait(limits.deadline)

    @property
    def graph(self) -> Graph:
        """The whole step of the only task as one graph, to look at or compare."""
        drawn = self.task.graph
        return Graph([*drawn.nodes.values(), *UpdateNode(self.updater).updates("update")], drawn.inputs)

    @checked
    def add_metric(self, name: str, fn: MetricFn) -> None:
        """Log `fn` of each step's samples under `name`; of several tasks, of each one's samples.

        Args:
            fn: `f(samples)`, of the scored samples as a `Batch`, to one number for all or a list of one for each, of
                which the mean is logged; or in any form of a reward. One that raises is NaN in this step, with a
                warning.

        Raises:
            ConfigError: it has another form. In a step: the trainer has a metric of that name.
        """
        for task in self.tasks.values():
            task.metrics[name] = Metric(name, fn)
            self._metrics.add(task.updater.named(name))

    @checked
    def add_guard(self, guard: SafetyGuard) -> None:
        """Watch metrics from now on, and go back to an earlier checkpoint when one falls. Without automatic checkpoints
        of your own they are saved in `log_dir`, four within `rollback_steps`.

        Raises:
            ConfigError: `log_dir=False` leaves no place for checkpoints, where `checkpoint_dir` names none.
        """
        if self.checkpoints is None:
            if self.log_dir is None:
                raise ConfigError(
                    "a guard goes back to checkpoints, and log_dir=False leaves no place for them: give the trainer "
                    "checkpoint_dir= and save_every="
                )
            folder, every = self.log_dir / "checkpoints", max(1, guard.rollback_steps // 4)
            self.checkpoints = AutomaticCheckpoints(folder, every, 2, background=False)
            logger.info("a checkpoint is saved to %s every %d steps", folder, every)
        store = self.checkpoints.store
        store.reach = max(store.reach, guard.rollback_steps, guard.window + 2)
        self.guards = [*self.guards, guard]

    def enable_3d_hybrid_engine(
        self, *, tensor_parallel_size: int | None = None, overlap_comm: bool | None = None
    ) -> Mesh:
        """Have the actor generate in a layout of its own on the ranks that train it; before the first step.

        Returns:
            The mesh of generation. See `enable_hybrid_engine`.
        """
        return enable_hybrid_engine(self.actor, tensor_parallel_size=tensor_parallel_size, overlap_comm=overlap_comm)

    def step(self, prompts: Any) -> dict[str, Any]:
        """One step: sample, score, and (unless `update_freq` says to wait) update every model.

        With several tasks, the rollouts run one at a time while the others' rewards are waited for; every optimizer
        step is then on the weighted sum of all tasks' losses, each normalised over its own samples. Metrics of one
        task begin with `task/<name>/`.

        Args:
            prompts: strings, chats, token ids, mappings or a `Batch`; see `Actor.prompts`. A batch that has
                `response_tokens` (of an `OfflineDatasetLoader`) is learned from as it is: nothing is sampled. For
                several tasks: rows that name theirs in a column `task`, or a mapping of tasks to such prompts
                (`TaskLoader`).

        Returns:
            The log record: `reward` (mean of the step's samples, a float; NaN if all abstained), `reward/mean`,
            `loss/actor`, `loss/critic`, `kl` (where there is a reference), `updated`, and more.

        Raises:
            TrainingError: too many updates in a row were not finite.
            RewardError, RolloutError: too many of the latest rewards or episodes failed.
        """
        began = self._begin()
        # Rollouts run one at a time; the rewards of one task are waited for while another task is sampled.
        work = {name: self._collect_task(name, part) for name, part in self.mixture.split(prompts).items()}
        samples = dict(zip(work, run_sync(all_of(work.values())), strict=True))
        return self._finish_step(self._learn_from(samples), began)

    def _collect_task(self, name: str, prompts: Any) -> Coroutine[Any, Any, Samples]:
        """What draws the samples of one task on the event loop. Names of samples say the step, and of several tasks
        which one."""
        task = self.tasks[name]
        key = f"s{self.steps}.{name}" if task.updater.name else f"s{self.steps}"
        rows = task.rows(prompts, key)
        self.mixture.began.setdefault(name, time.perf_counter())
        return task.collect(rows, key)

    def _learn_from(
        self, samples: Mapping[str, Samples], metrics: Mapping[str, Any] = MappingProxyType({})
    ) -> dict[str, Any]:
        """The record of a step with these samples of each task; they wait in the buffer until an update is due.

        Args:
            metrics: more for the record.
        """
        parts = [(self.tasks[name], drawn) for name, drawn in samples.items()]
        record = joined({task.updater.named(""): task.record(drawn) for task, drawn in parts})
        pools = [source.pools for source in sources_of(self._loader).values() if source.pools is not None]
        if pools:  # which go by how their prompts scored
            scores: dict[str, list[float | None]] = {}
            for metric in {each.options.metric for each in pools}:
                for task, drawn in parts:
                    scores |= drawn.scores(metric) if task.algorithm.online else {}
            record |= note_scores(self._loader, scores)
        add_metrics(record, metrics, self._metrics)
        rows: Mapping[str, Batch] = {name: drawn.rows for name, drawn in samples.items()}
        learned: dict[str, Any] = {}
        if self._update_freq is not None or not isinstance(self.buffer, MemoryBuffer) or len(self.buffer):
            rows = self._due(rows)
        if rows:
            for task in map(self.tasks.__getitem__, rows):
                share = self.mixture.shares[task.name] * len(self.tasks)
                task.updater.weight = (share if task.loss_weight is None else task.loss_weight) / len(rows)
            learned = self.learn(rows)
        learned["updated"] = bool(rows) and "update/empty" not in learned
        # An algorithm may have an estimate of the KL of its own, which counts instead of that of the samples.
        add_metrics(record, learned, self._metrics, {"kl", *(f"task/{name}/kl" for name in self.tasks)})
        self.mixture.update(self.steps + 1, rows, record)
        return record

    def _due(self, samples: Mapping[str, Batch]) -> Mapping[str, Batch]:
        """Put the samples of the only task into the buffer; what the update takes that is due now, if one is."""
        if self._former is None:
            self._former = sample_names(self.buffer.state())
        ((task, rows),) = samples.items()
        rows, wanted = renamed(rows, self._former), self._update_freq or 1
        # What an update takes at once needs no room to wait in.
        overflow = len(rows) > self.buffer.room and len(self.buffer) + len(rows) >= wanted
        if not overflow:
            self.buffer.add(rows)
            if len(self.buffer) < wanted:
                return {}
        waiting, self._former = self.buffer.drain(), set()
        return {task: Batch.concat([waiting, rows]) if overflow else waiting}

    def set_task_scheduler(self, scheduler: Any) -> None:
        """Let a scheduler change the tasks' shares after each step: `DynamicTaskWeightScheduler`, or another object
        with its `weights`, `update`, `state_dict` and `load_state_dict`.

        Raises:
            ConfigError: it names an unknown task, or there is only one.
        """
        if not all(task.updater.name for task in self.tasks.values()):  # a task alone has none
            raise ConfigError("a scheduler weighs several tasks against each other, and this trainer has one")
        check_known("the scheduler weighs task", scheduler.weights, self.tasks)
        self.mixture.scheduler = scheduler
        self.mixture.share_out()

    def _begin(self) -> float:
        """What every step begins with; the time. The log is open before anything is sampled."""
        if self.guards and self.checkpoints is not None and not self.checkpoints.store.steps():
            self.checkpoints.save(self)  # to go back to, from the first step on
        assert self.logger is not None
        self.runner.step = self.steps + 1
        return time.perf_counter()

    def _finish_step(self, record: dict[str, Any], began: float) -> dict[str, Any]:
        """What every step ends with: its time, its log record, a checkpoint where one is due."""
        seconds = time.perf_counter() - began
        spans = self.runner.spans[:]  # also of the time since the step before; threads add more meanwhile
        del self.runner.spans[: len(spans)]
        measured = {"time/step": seconds, **busy_shares(spans, seconds)}
        measured["memory/peak_gb"] = self.actor.group.call(ActorWorker.peak_memory) / 1e9
        add_metrics(record, measured, self._metrics)
        self.steps += 1
        updated = record["updated"] and "actor" not in skipped_roles(record) and record.get("grad_norm/actor") != 0
        self.updates += updated
        self.idle += not updated and ("update/empty" in record or record["updated"])
        logger.debug("step %d: %s", self.steps, ", ".join(f"{name}={value}" for name, value in record.items()))
        if unseen := [name for guard in self.guards for name in guard.unseen if name not in record]:
            record["guard/unseen"] = ", ".join(unseen)
        self.logger.log(self.steps, record)
        latest, self.latest = self.latest, None
        # Recorded data of offline algorithms are no completions.
        if latest is not None and (sampled := {k: v for k, v in latest[0].items() if self.tasks[k].algorithm.online}):
            self.logger.completions(self.steps, lambda: completions(sampled, latest[1], self.actor.tokenizer.decode))
        for guard in self.guards:
            guard.observe(record, self.steps)
        for guard in self.guards:
            if (alert := guard.check(self, record)) is not None:
                return {**record, "guard/back_to": float(alert.back_to)}
        if self.steps != self._goal:
            self._evaluate_and_save()
        return record

    def close(self) -> None:
        """End what the trainer has started besides itself; the next step starts it again."""
        if self.checkpoints is not None:
            self.checkpoints.close()
        for source in (source for task in self.tasks.values() for source in task.sources.values()):
            source.close()

    def check_failures(self) -> None:
        """Raises RewardError or RolloutError if every reward, or every episode, of a task has failed so far."""
        for task in self.tasks.values():
            if task.episodes.all:
                raise RolloutError("every episode failed (the warnings say why), so nothing was learned: fix it")
            for source in task.sources.values():
                source.check_failures()

    def learn(self, samples: Batch | Mapping[str, Batch]) -> dict[str, Any]:
        """Update every model from scored samples; of several tasks, by task."""
        by_name = {self.task.name: samples} if isinstance(samples, Batch) else samples
        if not any(map(len, by_name.values())):  # the algorithm rejected them all
            return {"update/empty": 1.0}
        if self._permute:
            by_name = {name: permuted(batch, seed=self.steps) for name, batch in by_name.items()}
        drawn = [(self.tasks[name].updater, batch) for name, batch in by_name.items()]
        prepared, metrics, seconds = run_sync(learn(self.actor, drawn, self.runner))
        self.latest = by_name, dict(zip(by_name, prepared, strict=True))
        if "update/empty" in metrics:
            return metrics
        check_finite(self, metrics)
        tokens = sum(sum(without_baselines(batch).lengths("response_tokens")) for batch in by_name.values())
        tokens -= round(metrics.get("update/tokens_left_out/actor", 0.0))
        rates = {"train/tokens": tokens, "train/tokens_per_s": tokens / max(seconds, 1e-9), "time/update": seconds}
        return disjoint("a metric of the algorithm", metrics, rates)

    @checked
    def evaluate(
        self,
        prompts: Any,
        metrics: Metrics = None,
        *,
        n: AtOnce = 1,
        temperature: Temperature = 0.0,
        top_p: Portion | None = None,
        top_k: Natural | None = None,
    ) -> Evaluation:
        """Sample and score held-out prompts; nothing is learned.

        Args:
            prompts: of several tasks, rows that name theirs in a column `task`, or a mapping of tasks to prompts.
            metrics: your own, as `add_metric` takes them: by name, or as a list (or one alone) under the names of the
                functions.
            n: samples a prompt.
            temperature: 0 is greedy.
            top_p, top_k: None: as in training.

        Returns:
            The evaluation of all tasks together; the metrics of each are there under `task/<name>/`.
        """
        sampling: dict[str, Any] = {"n": n, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        rows = prompts.batch if isinstance(prompts, PromptDataset) else prompts
        if isinstance(rows, Batch) and "task" in rows:  # groups are numbered over all tasks
            prompts = rows.drop(["id", "group"]).add({"group": [f"eval.{row}" for row in range(len(rows))]})
        parts, users = self.mixture.split(prompts), named_metrics(metrics)
        tasks = {name: self.tasks[name] for name in parts}
        evaluations = {t.updater.named(""): t.evaluate(parts[name], users, **sampling) for name, t in tasks.items()}
        return together(evaluations, users)

    def evaluate_loss(self, batch: Any) -> dict[str, float]:
        """Loss and metrics of an update (such as preference accuracy) on recorded rows, a `Batch` or rows as
        `OfflineDatasetLoader` takes them; nothing is learned."""
        task = self.task
        state_before = task.algorithm.state_dict()
        try:
            recorded = run_sync(task.replay(task.rows(batch, "eval"), "eval", in_step=False))
            prepared, metrics = task.updater.prepare(recorded.batch)
        finally:
            task.algorithm.load_state_dict(state_before)
        of_loss = self.actor.compute_loss(prepared, task.algorithm)
        return disjoint(f"a metric of algorithm '{task.algorithm.name}'", metrics, of_loss)


class PPOTrainer(Trainer):
    """`Trainer` with PPO: `PPOTrainer(actor=actor, reward_fn=f)` makes its own critic."""

    algorithm_name = "ppo"
