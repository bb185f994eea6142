"""The trainer: the one-step graph of an algorithm, run again and again, evaluated, logged and saved.

What a step is stands in `verl.trainer.step`. Between its two halves stands the buffer, and the choice of samples by
algorithms that reject some. The trainer never asks which algorithm it runs; what it must know stands on the algorithm's
contract.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from verl._base.checked import checked
from verl._base.names import disjoint
from verl._base.record import AtOnce, Count, Natural, Portion
from verl.algorithms import BaseAlgorithm
from verl.batch import Batch
from verl.checkpoint.directory import AutomaticCheckpoints
from verl.cluster.controller import start
from verl.data.buffers import Buffer
from verl.data.loader import note_scores, pooled
from verl.data.prefetch import Loader
from verl.data.task_loader import by_task
from verl.data.tokenize import Truncation
from verl.dataflow.executor import all_of
from verl.dataflow.graph import Graph
from verl.dataflow.nodes import UpdateNode, log_prob_nodes
from verl.errors import CheckpointError, ConfigError, DataError
from verl.report.completions import completions
from verl.report.metrics import Metric, MetricFn, add_metrics
from verl.report.samples import kl_to_reference, permuted
from verl.report.sinks import Logger, open_logger, run_directory, set_aside
from verl.report.timeline import busy_shares
from verl.rewards.failures import Failures
from verl.roles.actor import Actor
from verl.roles.critic import Critic
from verl.roles.layouts import by_workers, enable_hybrid_engine, lay_out
from verl.roles.reward import Reward
from verl.roles.updater import Updater
from verl.rollout.base import SamplingParams
from verl.rollout.options import Temperature
from verl.tasks.task import Task
from verl.trainer.active_task import ActiveTask, Samples, critics_of
from verl.trainer.batches import as_loader, next_batch, one_pass, read_ahead
from verl.trainer.evaluation import Evaluation, HeldOut, Metrics, named_metrics, numbered, together
from verl.trainer.mixture import Mixture
from verl.trainer.options import (
    BufferOptions,
    CheckpointOptions,
    LimitOptions,
    LoggingOptions,
    TrainerOptions,
    others,
    tasks_of,
)
from verl.trainer.outcome import check_finite, check_learned, skipped_roles
from verl.trainer.requirements import check_permuted
from verl.trainer.runner import Run
from verl.trainer.signals import StopSignal
from verl.trainer.step import draw, learn
from verl.trainer.task_records import joined, trained
from verl.trainer.update_buffer import UpdateBuffer
from verl.weights.layout import Mesh

if TYPE_CHECKING:
    from verl.checkpoint.store import Checkpoint
    from verl.keywords import TrainerKeywords
    from verl.trainer.guard import Guards, SafetyGuard
    from verl.trainer.mixture import TaskScheduler

logger = logging.getLogger(__name__)


def _of_the_task(name: str) -> Any:
    return property(attrgetter(f"task.{name}"), doc=f"`{name}` of the only task.")


class Trainer:
    """Trains an actor on prompts by any algorithm.

    Args:
        actor: the policy, or a model, or the name or directory of one.
        critic: the value model, likewise; None: made from the actor's where the algorithm has one.
        reward: a `Reward`, or anything `Reward` takes; None for algorithms without one.
        algorithm, n, sampling, nodes: see `Task`.
        tasks: a list of `Task`s, instead of reward, cost, algorithm, n, sampling and nodes. Several train the one actor
            together: see `step`.
        held_out: what `fit` evaluates before its first step, every so many steps, and after its last.
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
              beside `reward`; a mapping of names to these; or an `EnvironmentEpisode`, which has options
            - `config_path`: a YAML file of tasks, in the place of `tasks`; see `TaskConfig`
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
    #: Whether a step decides what the next one draws.
    draws_late: ClassVar[bool] = False
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
        of_tasks = others(rest)
        #: What `train` goes over.
        self.dataloader: Iterable[Any] | None = of_tasks.pop("dataloader", None)
        permute_rewards = of_tasks.pop("permute_rewards", False)
        skip_zero_advantage_rows = of_tasks.pop("skip_zero_advantage_rows", True)
        tasks = tasks_of(
            rest,
            **of_tasks,
            reward=reward,
            algorithm=algorithm or self.algorithm_name,
            tasks=tasks,
            n=n,
            sampling=sampling,
            nodes=nodes,
            actor=actor,
        )
        if permute_rewards:
            for task in tasks:
                check_permuted(task.algorithm)
        self.checkpoints = AutomaticCheckpoints.of(options.checkpoints)
        self.limits = options.limits
        self.actor = actor if isinstance(actor, Actor) else Actor(actor, head=tasks[0].algorithm.head)
        self._make_tasks(tasks, critic, options)
        for handle in self.roles.values():
            handle.plan = replace(handle.plan, skip_zero_advantage_rows=skip_zero_advantage_rows)
        self._permute = permute_rewards
        #: The samples of the latest update by task, and the same as `prepare` left them.
        self.latest: tuple[Mapping[str, Batch], Mapping[str, Batch]] | None = None
        self.mixture = Mixture(self.tasks)
        if options.buffer.buffer != "memory":  # it lies outside of the process, and belongs to the driver
            self.actor.controller.start()
        self._waiting = UpdateBuffer(options.buffer)
        self.buffer = self._waiting.buffer
        self.held_out = held_out
        if held_out is not None and held_out.kl:
            self.actor.make_reference()
        self._begin_run(options.logging)

    def _make_tasks(self, tasks: Sequence[Task], critic: Any, options: TrainerOptions) -> None:
        """Lay the models out over their ranks, and bind each task to them."""
        waiting, limits, layout = options.buffer, options.limits, options.placement
        if len(tasks) > 1 and (waiting.update_freq, waiting.buffer, waiting.buffer_size) != (None, "memory", None):
            raise ConfigError(
                "several tasks update in every step: leave buffer, buffer_size and update_freq out of the trainer"
            )
        critics = critics_of(tasks, critic)
        lay_out(
            [self.actor, *(critic for critic in critics.values() if critic is not None)],
            (layout.placement, layout.device_map, by_workers(layout.num_rollout_workers, layout.num_update_workers)),
            layout.strategy,
            layout.use_amp,
        )
        self.runner = Run(deadline=limits.deadline, shares_models=len(tasks) > 1, timeline=options.logging.timeline)
        #: By name.
        self.tasks = {
            task.name: ActiveTask(task, self.actor, critics[task.name], self.runner, limits) for task in tasks
        }
        for active in self.tasks.values():
            for role, source in active.sources.items():
                source.set_placement(self.actor.controller, role)
                source.set_seed(self.actor.plan.seed)
        for controller in {handle.controller for handle in self.roles.values()}:
            controller.wait(limits.deadline)
        if len(tasks) > 1:
            for name, active in self.tasks.items():
                active.updater.name = f"task/{name}"
            # Samples of another temperature say so.
            self.actor.plan = replace(self.actor.plan, temperature=1.0)
        elif self.algorithm.online:  # log-probs are of logits at the temperature that samples are drawn at
            self.actor.plan = replace(self.actor.plan, temperature=self.sampling.temperature or 1.0)

    def _begin_run(self, logging: LoggingOptions) -> None:
        """No step was made, and nothing was logged."""
        #: Digest of the settings of `verl train`; part of its checkpoints' identity.
        self.settings: str | None = None
        self.steps = 0
        #: Updates that changed the policy, and those that did not: empty, without a finite gradient, or one of 0.
        self.updates = self.idle = 0
        #: Latest updates in a row that were not finite.
        self.skipped = 0
        self.guards: Guards | None = None
        self._goal: int | None = None
        self._loader: Loader | None = None
        self._position: dict[str, Any] | None = None
        #: Where TensorBoard events, `metrics.jsonl` and a guard's checkpoints go; None: nowhere.
        self.log_dir = run_directory(logging.log_dir, next(iter(self.tasks.values())).algorithm.name)
        self._logger: Logger | None = None
        self._goes_on = False  # from a checkpoint, or where there could have been one
        self._hooks = [] if logging.on_log_hook is None else [logging.on_log_hook]
        if logging.logger is not None:
            self.use_logger(logging.logger)

    @property
    def task(self) -> ActiveTask:
        """The only task.

        Raises:
            ConfigError: there are several.
        """
        if len(self.tasks) > 1:
            raise ConfigError(f"this trainer has several tasks, see trainer.tasks: {', '.join(self.tasks)}")
        return next(iter(self.tasks.values()))

    @property
    def graph(self) -> Graph:
        """The whole step of the only task as one graph, to look at or compare."""
        drawn = self.task.graph
        return Graph([*drawn.nodes.values(), *UpdateNode(self.updater).updates("update")], drawn.inputs)

    @property
    def roles(self) -> dict[str, Actor | Critic]:
        """The models that are trained: the actor, and the critics; of several tasks, each with its task's name."""
        several = len(self.tasks) > 1
        critics = {
            f"{role}-{task.name}" if several else role: critic
            for task in self.tasks.values()
            for role, critic in task.updater.critics.items()
        }
        return {"actor": self.actor, **critics}

    @property
    def logger(self) -> Logger:
        if self._logger is None:
            if self.log_dir is not None and not self._goes_on:
                set_aside(self.log_dir)
            self.use_logger(open_logger(self.log_dir, run_id=self.log_dir.name if self.log_dir else ""))
        assert self._logger is not None
        return self._logger

    def use_logger(self, logger: Logger) -> None:
        """Log to `logger` from now on, hooks included."""
        for hook in self._hooks:
            logger.on_log_hook(hook, self.limits.deadline)
        self._logger = logger

    @checked
    def on_log_hook(self, fn: Callable[[int, dict[str, Any]], None]) -> None:
        """`fn(step, record)` gets every log record from now on."""
        self._hooks.append(fn)
        if self._logger is not None:
            self._logger.on_log_hook(fn, self.limits.deadline)

    @checked
    def add_metric(self, name: str, fn: MetricFn) -> None:
        """Log `fn` of each step's samples under `name`; of several tasks, of each one's samples.

        Args:
            fn: `f(samples)`, of the scored samples as a `Batch`, to one number for all or a list of one for each, of
                which the mean is logged; or in any form of a reward. One that raises is NaN in this step, with a
                warning.

        Raises:
            ConfigError: it has none of these forms. In a step: the trainer has a metric of that name.
        """
        for task in self.tasks.values():
            task.metrics[name] = Metric(name, fn)

    def add_guard(self, guard: SafetyGuard) -> None:
        """Watch metrics from now on, and go back to an earlier checkpoint when one falls. Without automatic checkpoints
        of your own they are saved in `log_dir`, four within `rollback_steps`.

        Raises:
            ConfigError: `log_dir=False` leaves no place for checkpoints, where `checkpoint_dir` names none.
        """
        from verl.trainer.guard import with_guard

        self.guards = with_guard(self.guards, guard, self)

    def save_automatically(self, every: int) -> AutomaticCheckpoints:
        """The automatic checkpoints; where there are none, from now on one in `log_dir` every `every` steps.

        Raises:
            ConfigError: `log_dir=False` leaves no place for them.
        """
        if self.checkpoints is None:
            if self.log_dir is None:
                raise ConfigError(
                    "a guard goes back to checkpoints, and log_dir=False leaves no place for them: give the trainer "
                    "checkpoint_dir= and save_every="
                )
            self.checkpoints = AutomaticCheckpoints(self.log_dir / "checkpoints", every, 2, background=False)
            logger.info("a checkpoint is saved to %s every %d steps", self.log_dir / "checkpoints", every)
        return self.checkpoints

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

        Of several tasks, the rollouts run one at a time while the others' rewards are waited for; every optimizer
        step is then on the weighted sum of all tasks' losses, each normalised over its own samples. What the metrics
        of one task are called begins with `task/<name>/`.

        Args:
            prompts: strings, chats, token ids, mappings or a `Batch`; see `Actor.prompts`. A batch that has
                `response_tokens` (of an `OfflineDatasetLoader`) is learned from as it is: nothing is sampled. Of
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
        return self._finish_step(self._learn_from(self._collect(prompts)), began)

    def _collect(self, prompts: Any) -> dict[str, Samples]:
        """The samples of each task that has prompts, drawn side by side: rollouts run one at a time, and the
        rewards of one task are waited for while another is sampled."""
        parts = {self.task.name: prompts} if len(self.tasks) == 1 else by_task(prompts, [*self.tasks])
        work = {name: self._collect_task(name, part) for name, part in parts.items()}
        return dict(zip(work, self.runner.wait(all_of(work.values())), strict=True))

    def _collect_task(self, name: str, prompts: Any) -> Coroutine[Any, Any, Samples]:
        """What draws the samples of one task on the event loop. Names of samples say the step, and of several tasks
        which one."""
        key = f"s{self.steps}" if len(self.tasks) == 1 else f"s{self.steps}.{name}"
        task = self.tasks[name]
        rows = task.rows(prompts, key)
        task.check(rows)
        self.mixture.begin(name)
        return task.collect(rows, key)

    def _learn_from(self, samples: Mapping[str, Samples]) -> dict[str, Any]:
        """The record of a step with these samples of each task; they wait in the buffer until an update is due."""
        record = self._record(samples)
        rows: Mapping[str, Batch] = {name: drawn.rows for name, drawn in samples.items()}
        due = self._waiting.add(rows)
        self._add(record, {"updated": False} if due is None else self._learn(due))
        self.mixture.update(self.steps + 1, rows, record)
        return record

    def _record(self, samples: Mapping[str, Samples]) -> dict[str, Any]:
        records = {name: self.tasks[name].record(drawn) for name, drawn in samples.items()}
        sizes = self._note(samples) if pooled(self._loader) else {}
        return joined({name: drawn.rows for name, drawn in samples.items()}, records, self.tasks) | sizes

    def _note(self, samples: Mapping[str, Samples]) -> dict[str, int]:
        """Tell a loader with pools how its prompts scored; their sizes."""
        scores: dict[str, list[float | None]] = {}
        for metric in {source.pools.options.metric for source in pooled(self._loader).values() if source.pools}:
            for name, drawn in samples.items():
                scores |= drawn.scores(metric) if self.tasks[name].algorithm.online else {}
        return note_scores(self._loader, scores)

    def _learn(self, samples: Mapping[str, Batch]) -> dict[str, Any]:
        for name, weight in self.mixture.weights(samples).items():
            self.tasks[name].updater.weight = weight
        metrics = self.learn(samples if len(self.tasks) > 1 else samples[self.task.name])
        return {**metrics, "updated": "update/empty" not in metrics}

    def set_task_scheduler(self, scheduler: TaskScheduler) -> None:
        """Let a scheduler change the tasks' shares after each step, such as `DynamicTaskWeightScheduler`.

        Raises:
            ConfigError: it names an unknown task, or there is only one.
        """
        self.mixture.follow(scheduler)

    def _begin(self) -> float:
        """What every step begins with; the time. The log is open before anything is sampled."""
        if self.guards is not None:
            self.guards.begin(self)
        assert self.logger is not None
        self.runner.step = self.steps + 1
        return time.perf_counter()

    def _finish_step(self, record: dict[str, Any], began: float) -> dict[str, Any]:
        """What every step ends with: its time, its log record, a checkpoint where one is due."""
        seconds = time.perf_counter() - began
        self._add(record, {"time/step": seconds, **busy_shares(self.runner.take_spans(), seconds)})
        self._add(record, {"memory/peak_gb": self.actor.peak_memory() / 1e9})
        self.steps += 1
        updated = record["updated"] and "actor" not in skipped_roles(record) and record.get("grad_norm/actor") != 0
        self.updates += updated
        self.idle += not updated and ("update/empty" in record or record["updated"])
        logger.debug("step %d: %s", self.steps, ", ".join(f"{name}={value}" for name, value in record.items()))
        if self.guards is not None and (unseen := [name for name in self.guards.unseen if name not in record]):
            record["guard/unseen"] = ", ".join(unseen)
        self.logger.log(self.steps, record)
        latest, self.latest = self.latest, None
        # Recorded data of offline algorithms are no completions.
        if latest is not None and (sampled := {k: v for k, v in latest[0].items() if self.tasks[k].algorithm.online}):
            self.logger.completions(self.steps, lambda: completions(sampled, latest[1], self.actor.tokenizer.decode))
        if self.guards is not None and (alert := self.guards.check(self, record)) is not None:
            return {**record, "guard/back_to": float(alert.back_to)}
        if self.steps != self._goal:
            self._evaluate_and_save()
        return record

    def _add(self, record: dict[str, Any], more: Mapping[str, Any]) -> None:
        """Add to the record of a step; raises ConfigError where one name has two metrics."""
        users = {task.updater.named(name) for task in self.tasks.values() for name in task.metrics}
        # An algorithm may have an estimate of the KL of its own, which counts instead of that of the samples.
        add_metrics(record, more, users, {"kl", *(f"task/{name}/kl" for name in self.tasks)})

    @checked
    def fit(
        self,
        prompts: Any,
        steps: Natural | None = None,
        *,
        batch_size: Count | None = None,
        max_prompt_length: Count | None = None,
        truncation: Truncation = "error",
    ) -> dict[str, Any]:
        """`steps` steps over batches of prompts; the last record.

        Args:
            prompts: batches, in a loader, a list or any other iterable: a torch `DataLoader`, with whatever collator it
                has, begins anew at its end. With `batch_size`, the rows themselves: a torch or Hugging Face data set,
                a list, files. For offline algorithms the rows are those of an `OfflineDatasetLoader`.
            steps: None: one pass.
            batch_size: rows of a step.
            max_prompt_length, truncation: of rows: tokens of a prompt at most, and what becomes of longer ones.

        What is held out is evaluated on the way; with `checkpoint_dir`, the first Ctrl-C or SIGTERM ends it after the
        step at hand, with a checkpoint. A loader's position is in every checkpoint; after `load_checkpoint` or `resume`
        a loader over the same data goes on there.

        Raises:
            DataError: there are fewer batches than steps.
            ConfigError: a data set without `batch_size`; no `steps`, and the data have no length.
            TrainingError, RewardError, RolloutError: no update so far has changed the policy.
            CheckpointError: the disk does not take the last checkpoint.
            SystemExit: by a signal.
        """
        start()
        record: dict[str, Any] = {}
        loader = as_loader(prompts, batch_size, self, max_prompt_length, truncation)
        steps = one_pass(loader) if steps is None else steps
        loader, whole = read_ahead(loader, self), loader
        batches = self._open(loader)
        self._goal = self.steps + steps
        try:
            with StopSignal() if self.checkpoints is not None else nullcontext() as stop:
                if self.held_out is not None and self.held_out.before and self.held_out.first is None:
                    self.evaluate_held_out()
                if self.guards is not None:
                    self.guards.begin(self)
                while self.steps < self._goal and not (stop and stop.requested):
                    record = self.advance(batches)
                if stop and stop.requested:
                    self._checkpoints().save(self, last=True)
                    logger.info("stopped by %s after step %d; the same command goes on", stop.received, self.steps)
                    raise SystemExit(stop.exit_code)
                check_learned(self, record)
                self._evaluate_and_save(last=True)
        finally:
            self._goal = None
            if loader is not whole:
                self._loader = whole
                loader.close()
        return record

    def stop(self) -> None:
        """End `fit` after the step at hand, as if that were its last; for hooks."""
        if self._goal is not None:
            self._goal = self.steps

    @checked
    def train(self, steps: Natural | None = None) -> dict[str, Any]:
        """`fit` over the trainer's `dataloader`; None: as many steps as it has batches.

        Raises:
            ConfigError: there is no dataloader, or it says no length.
        """
        if self.dataloader is None:
            raise ConfigError(
                "train() is over the trainer's own data: give Trainer(dataloader=...), or call fit(data, n)"
            )
        return self.fit(self.dataloader, steps)

    def advance(self, prompts: Iterator[Any]) -> dict[str, Any]:
        """One step on the next batch of prompts.

        Raises:
            DataError: there is none.
        """
        if (batch := next_batch(prompts, self.limits.deadline)) is None:
            raise self._no_prompts()
        return self.step(batch)

    @property
    def position(self) -> dict[str, Any] | None:
        """Where the loader of `fit` is in its data; of a checkpoint that was loaded: where the next one goes on."""
        return self._position if self._loader is None else self._position_of(self._loader)

    @position.setter
    def position(self, position: dict[str, Any] | None) -> None:
        self._loader, self._position = None, position

    def _position_of(self, loader: Loader) -> dict[str, Any]:
        return loader.state_dict()

    def _open(self, prompts: Iterable[Any]) -> Iterator[Any]:
        position, self._position = self._position, None
        self._loader = prompts if isinstance(prompts, Loader) else None
        self.mixture.adopt(getattr(prompts, "loader", prompts))
        if position is not None and self._loader is not None:
            try:
                self._loader.load_state_dict(position)
            except Exception as error:  # of whatever loader the user has
                logger.warning("the checkpoint was saved over other prompts, so these begin where they are: %s", error)
        return iter(prompts)

    def _no_prompts(self) -> DataError:
        return DataError(
            f"the batches of prompts ended after {self.steps} steps: give as many as there are steps, or a loader "
            "without end, such as verl.data.loader.PromptLoader"
        )

    def _evaluate_and_save(self, *, last: bool = False) -> None:
        """Evaluate and save, where that is due; after the last step of `fit` both are."""
        held_out = self.held_out
        evaluated = None if held_out is None or held_out.last is None else held_out.last["step"]
        if held_out is not None and evaluated != self.steps and (last or held_out.is_due(self.steps)):
            self.evaluate_held_out()
        if self.checkpoints is None:
            return
        if not last and self.steps % self.checkpoints.every:
            with self.models_idle():
                self.checkpoints.finish(wait=False)
        elif (error := self.checkpoints.save(self, last=last)) is not None and last:
            raise CheckpointError(f"{error}; the run is trained but not saved: free space and run it again")

    def evaluate_held_out(self) -> dict[str, Any]:
        """Evaluate `held_out` now; returns and logs the result."""
        assert self.held_out is not None
        rows, began = self.held_out.rows, time.perf_counter()
        self.logger.phase(f"evaluating {len(rows)} held-out rows")
        evaluation: Evaluation | dict[str, float]
        measured: dict[str, float] = {}
        if isinstance(rows, Batch):
            evaluation = self.evaluate_loss(rows)
        else:
            options = self.held_out
            evaluation = self.evaluate(rows.batch, options.metrics, **options.sampling)
            if options.kl:
                graph = Graph([*log_prob_nodes(self.actor)], evaluation.samples.columns)
                samples = self.runner.wait(draw(graph, evaluation.samples, self.runner, in_step=False)).batch
                measured["kl/eval"] = kl_to_reference(samples, "log_probs", greedy=options.temperature == 0)
        result = self.held_out.note(self.steps, evaluation)
        metrics = {f"eval/{name}": value for name, value in result["metrics"].items()} | measured
        self.logger.log(self.steps, {**metrics, "time/evaluation": time.perf_counter() - began})
        if self.guards is not None:
            self.guards.observe(metrics, self.steps)
        return result

    def close(self) -> None:
        """End what the trainer has started besides itself; the next step starts it anew."""
        if self.checkpoints is not None:
            self.checkpoints.close()
        for task in self.tasks.values():
            task.close()

    def check_failures(self) -> None:
        """Raises RewardError or RolloutError if every reward, or every episode, of a task has failed so far."""
        for task in self.tasks.values():
            task.check_failures()

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

    def learn(self, samples: Batch | Mapping[str, Batch]) -> dict[str, Any]:
        """Update every model from scored samples; of several tasks, by task."""
        by_name = {self.task.name: samples} if isinstance(samples, Batch) else samples
        if not any(map(len, by_name.values())):  # the algorithm rejected them all
            return {"update/empty": 1.0}
        if self._permute:
            by_name = {name: permuted(batch, seed=self.steps) for name, batch in by_name.items()}
        drawn = [(self.tasks[name].updater, batch) for name, batch in by_name.items()]
        prepared, metrics, seconds = self.runner.wait(learn(self.actor, drawn, self.runner))
        self.latest = by_name, dict(zip(by_name, prepared, strict=True))
        if "update/empty" in metrics:
            return metrics
        check_finite(self, metrics)
        return disjoint("a metric of the algorithm", metrics, trained(by_name.values(), metrics, seconds))

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
            Of several tasks, all together; the metrics of each are there under `task/<name>/`.
        """
        sampling: dict[str, Any] = {"n": n, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        if len(self.tasks) == 1:
            return self.task.evaluate(prompts, metrics, **sampling)
        parts, users = by_task(numbered(prompts), [*self.tasks]), named_metrics(metrics)
        evaluations = {name: self.tasks[name].evaluate(rows, users, **sampling) for name, rows in parts.items()}
        return together(evaluations, users)

    def evaluate_loss(self, batch: Any) -> dict[str, float]:
        """Loss and metrics of an update (such as preference accuracy) on recorded rows, a `Batch` or rows as
        `OfflineDatasetLoader` takes them; nothing is learned."""
        return self.task.evaluate_loss(batch)

    @checked
    def save_checkpoint(self, path: str | Path) -> None:
        """Write everything an exact resume needs to a directory, whole or not at all.

        Raises:
            CheckpointError: the disk did not take it, or what is at `path` is no checkpoint; it is untouched.
        """
        from verl.checkpoint import state

        if self.checkpoints is not None:
            self.checkpoints.close()  # one save at a time
        with self.models_idle():
            result = state.save(self, Path(path))
        if not result:
            raise CheckpointError(
                f"{result.error}; what was there before is untouched: free space or name another directory"
            )

    @checked
    def load_checkpoint(self, path: str | Path) -> None:
        """Go on exactly from what `save_checkpoint` wrote.

        Raises:
            CheckpointError: the checkpoint is damaged, or belongs to another model or algorithm.
        """
        from verl.checkpoint import state

        state.load(self, Path(path))
        self._goes_on = True
        if self.checkpoints is not None:
            self.checkpoints.saved = None

    def resume(self, data: Loader | None = None) -> int | None:
        """Go on from the newest whole checkpoint of `checkpoint_dir`; its step, or None if there is none.

        Args:
            data: what `fit` will read: a checkpoint with a position that is none is passed over as damaged.

        Raises:
            CheckpointError: none is whole, or they belong to another model, algorithm or settings.
            DataError: they are of other data.
        """
        step = self._checkpoints().resume(self, data)
        self._goes_on = True
        if step is not None:
            logger.info("going on from step %d", step)
        return step

    @checked
    def rollback(self, step: Natural, *, skip_data: bool = False) -> None:
        """Go back to the automatic checkpoint of `step`; later ones are removed, so that it is the newest.

        Args:
            skip_data: `fit` goes on after the data that it has read so far, not where the checkpoint was.

        Raises:
            CheckpointError: there is no such checkpoint, it is damaged, or the disk refuses.
        """
        loader = self._loader
        self._checkpoints().rollback(self, step)
        if skip_data:
            self._loader, self._position = loader, None

    def _checkpoints(self) -> AutomaticCheckpoints:
        if self.checkpoints is None:
            raise ConfigError("this trainer has no automatic checkpoints: give it checkpoint_dir= and save_every=")
        return self.checkpoints

    def models_idle(self) -> AbstractContextManager[Any]:
        """No node of a task works on the models meanwhile."""
        return self.runner.models_idle()
