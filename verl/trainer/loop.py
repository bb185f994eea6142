"""Around the steps of a trainer: data, log, evaluations, checkpoints, an orderly end."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from verl._base.checked import checked
from verl._base.record import Count, Natural
from verl.batch import Batch
from verl.checkpoint import state
from verl.checkpoint.directory import AutomaticCheckpoints
from verl.checkpoint.store import Checkpoint
from verl.cluster.controller import start
from verl.data.prefetch import Loader, Prefetch
from verl.data.tokenize import Truncation
from verl.dataflow.graph import Graph
from verl.dataflow.loop import run_sync
from verl.dataflow.nodes import output_node
from verl.errors import CheckpointError, ConfigError, DataError, TrainingError
from verl.report.samples import kl_to_reference
from verl.report.sinks import Logger, open_logger, run_directory, set_aside
from verl.roles.actor import Actor
from verl.roles.reads import ModelOutput
from verl.trainer.batches import as_loader, next_batch, one_pass, read_ahead
from verl.trainer.evaluation import Evaluation, HeldOut
from verl.trainer.options import TrainerOptions
from verl.trainer.runner import Run
from verl.trainer.signals import StopSignal
from verl.trainer.step import draw
from verl.trainer.tasks import Mixture

if TYPE_CHECKING:
    from verl.data.buffers import Buffer
    from verl.roles.critic import Critic
    from verl.trainer.guard import SafetyGuard
    from verl.trainer.task import Task

logger = logging.getLogger(__name__)


class Loop:
    """The loop over steps; `Trainer` has the steps.

    Args:
        name: of the algorithm, which names the log directory.
    """

    actor: Actor
    #: The models that are trained, by role.
    roles: Mapping[str, Actor | Critic]
    #: By name.
    tasks: Mapping[str, Task]
    mixture: Mixture
    buffer: Buffer
    runner: Run
    check_failures: Callable[[], None]
    step: Callable[..., dict[str, Any]]
    evaluate: Callable[..., Evaluation]
    evaluate_loss: Callable[..., dict[str, float]]
    #: Whether a step decides what the next one draws.
    needs_previous_step: ClassVar[bool] = False

    def __init__(
        self, options: TrainerOptions, dataloader: Iterable[Any] | None, held_out: HeldOut | None, name: str
    ) -> None:
        #: What `train` goes over.
        self.dataloader, self.held_out, self.limits = dataloader, held_out, options.limits
        self.checkpoints, logging = AutomaticCheckpoints.of(options.checkpoints), options.logging
        #: Digest of the settings of `verl train`; part of its checkpoints' identity.
        self.settings: str | None = None
        self.steps = 0
        #: Updates that changed the policy, and those that did not: empty, without a finite gradient, or one of 0.
        self.updates = self.idle = 0
        #: Latest updates in a row that were not finite.
        self.skipped = 0
        self.guards: list[SafetyGuard] = []
        self._goal: int | None = None
        self._loader: Loader | None = None
        self._position: dict[str, Any] | None = None
        #: Where TensorBoard events, `metrics.jsonl` and a guard's checkpoints go; None: nowhere.
        self.log_dir = run_directory(logging.log_dir, name)
        self._logger: Logger | None = None
        self._goes_on = False  # from a checkpoint, or where there could have been one
        self._hooks = [] if logging.on_log_hook is None else [logging.on_log_hook]
        if logging.logger is not None:
            self.use_logger(logging.logger)

    @property
    def task(self) -> Task:
        """The only task.

        Raises:
            ConfigError: there are several.
        """
        try:
            (task,) = self.tasks.values()
        except ValueError:
            raise ConfigError(f"this trainer has several tasks, see trainer.tasks: {', '.join(self.tasks)}") from None
        return task

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
                has, starts over at its end. With `batch_size`, the rows themselves: a torch or Hugging Face data set,
                a list, files. Offline algorithms take the rows of an `OfflineDatasetLoader`.
            steps: None: one pass.
            batch_size: rows of a step.
            max_prompt_length, truncation: of rows: tokens of a prompt at most, and what becomes of longer ones.

        Held-out data are evaluated on the way; with `checkpoint_dir`, the first Ctrl-C or SIGTERM ends it after the
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
                while self.steps < self._goal and not (stop and stop.received):
                    record = self.advance(batches)
                if stop and stop.received:
                    self._checkpoints().save(self, last=True)
                    logger.info("stopped by %s after step %d; the same command goes on", stop.received, self.steps)
                    raise SystemExit(128 + stop.received)
                check_learned(self, record)
                self._evaluate_and_save(last=True)
        finally:
            self._goal = None
            if isinstance(loader, Prefetch) and loader is not whole:
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
            DataError: the batches have ended.
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
        is_due = held_out is not None and (last or (held_out.every is not None and not self.steps % held_out.every))
        if held_out is not None and is_due and (held_out.last is None or held_out.last["step"] != self.steps):
            self.evaluate_held_out()
        if self.checkpoints is None:
            return
        if not last and self.steps % self.checkpoints.every:
            if self.checkpoints.pending is not None:
                with self.runner.models.hold():
                    self.checkpoints.finish(wait=False)
        elif (error := self.checkpoints.save(self, last=last)) is not None and last:
            raise CheckpointError(f"{error}; the run is trained but not saved: free space and run it again")

    def evaluate_held_out(self) -> dict[str, Any]:
        """Evaluate `held_out` now; returns and logs the result."""
        held_out = self.held_out
        assert held_out is not None
        rows, began = held_out.rows, time.perf_counter()
        self.logger.phase(f"evaluating {len(rows)} held-out rows")
        measured: dict[str, float] = {}
        if isinstance(rows, Batch):
            result = held_out.note(self.steps, self.evaluate_loss(rows))
        else:
            sampling = {name: getattr(held_out, name) for name in ("n", "temperature", "top_p", "top_k")}
            evaluation = self.evaluate(rows.batch, held_out.metrics, **sampling)
            if held_out.kl:
                outputs = (
                    ModelOutput("log_probs", "actor", self.actor.compute_log_probs),
                    ModelOutput("ref_log_probs", "reference", self.actor.compute_ref_log_probs),
                )
                graph = Graph([output_node(output, self.actor) for output in outputs], evaluation.samples.columns)
                samples = run_sync(draw(graph, evaluation.samples, self.runner, in_step=False)).batch
                measured["kl/eval"] = float(kl_to_reference(samples, "log_probs", greedy=held_out.temperature == 0))
            result = held_out.note(self.steps, evaluation)
        metrics = {f"eval/{name}": value for name, value in result["metrics"].items()} | measured
        self.logger.log(self.steps, {**metrics, "time/evaluation": time.perf_counter() - began})
        for guard in self.guards:
            guard.observe(metrics, self.steps)
        return result

    @checked
    def save_checkpoint(self, path: str | Path) -> None:
        """Write everything an exact resume needs to a directory, whole or not at all.

        Raises:
            CheckpointError: the disk did not take it, or what is at `path` is no checkpoint; it is untouched.
        """
        if self.checkpoints is not None:
            self.checkpoints.close()  # one save at a time
        with self.runner.models.hold():
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
        state.load(self, Path(path))
        self._goes_on = True
        if self.checkpoints is not None:
            self.checkpoints.saved = None

    def resume(self, data: Loader | None = None) -> int | None:
        """Go on from the newest whole checkpoint of `checkpoint_dir`; its step, or None without a checkpoint.

        Args:
            data: what `fit` will read: a checkpoint whose position does not fit is passed over as damaged.

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
        self._checkpoints().resume(self, step=step)
        if skip_data:
            self._loader, self._position = loader, None

    def _checkpoints(self) -> AutomaticCheckpoints:
        if self.checkpoints is None:
            raise ConfigError("this trainer has no automatic checkpoints: give it checkpoint_dir= and save_every=")
        return self.checkpoints

    def extra_files(self) -> dict[str, Any]:
        """Further files of a checkpoint, of this kind of trainer."""
        return {}

    def read_extra_files(self, checkpoint: Checkpoint, *, restore: bool) -> None:
        """Check `extra_files`, before anything is restored; or `restore` what they hold.

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


def check_learned(trainer: Loop, record: Mapping[str, Any]) -> None:
    """For the end of training, whose last record is given.

    Raises:
        RewardError, RolloutError: see `Trainer.check_failures`.
        TrainingError: there were updates, and none has changed the policy. Of one alone whose samples have no gradient,
            or are all rejected, a warning tells: it may be chance.
    """
    trainer.check_failures()
    last = None if trainer.held_out is None else trainer.held_out.last
    if last is not None and not trainer.steps and last["metrics"][last["headline"]] is None:
        raise TrainingError("the evaluation found nothing: no held-out sample has a reward (the warnings say why)")
    if not trainer.idle or trainer.updates:
        return
    sources = [task.sources["reward"] for task in trainer.tasks.values() if "reward" in task.sources]
    names = ", ".join(f"'{reward.source.name}'" for reward in sources)
    if math.isnan(record.get("reward", 0.0)):
        cause = f"reward {names} gave no finite number for any sample of the last step"
    elif record.get("grad_norm/actor") == 0 and "update/empty" not in record:
        cause = "no token had a gradient other than 0"
        cause += f": reward {names} gave the samples of a prompt one number" if names else ""
    elif trainer.skipped:
        cause = "the loss or its gradient was not finite: lower the learning rate, or train in float32"
    else:
        names = ", ".join(f"'{task.algorithm.name}'" for task in trainer.tasks.values())
        cause = f"algorithm {names} found no sample to learn from"
    # Samples of one update may score alike by chance.
    if trainer.idle == 1 and not trainer.skipped and not math.isnan(record.get("reward", 0.0)):
        logger.warning("the only update did not change the policy: %s", cause)
        return
    raise TrainingError(f"nothing was learned, none of {trainer.idle} updates changed the policy: {cause}")


def check_finite(trainer: Loop, metrics: Mapping[str, Any]) -> None:
    """Count updates that were not finite.

    Raises:
        TrainingError: too many in a row; the trainer is back at the last good checkpoint, if it has one.
    """
    trainer.skipped = trainer.skipped + 1 if skipped_roles(metrics) else 0
    if trainer.skipped < trainer.limits.max_skipped_updates:
        return
    text = (
        f"{trainer.skipped} updates in a row had a loss or gradient that is not finite (step {trainer.steps + 1}): "
        "lower the learning rate, look at the rewards, or train in float32"
    )
    if trainer.checkpoints is not None and (step := trainer.checkpoints.last_good(trainer)) is not None:
        trainer.rollback(step)
        text += f". The weights and the newest checkpoint are those of step {step}"
    raise TrainingError(text)


def skipped_roles(metrics: Mapping[str, Any]) -> set[str]:
    """Models of which no optimizer step was finite, such as "actor" or "task/math/critic"."""
    roles = set()
    for name, skipped in metrics.items():
        before, part, role = name.partition("update/skipped/")
        if part and skipped and skipped >= metrics.get(f"{before}update/steps/{role}", skipped):
            roles.add(before + role)
    return roles
