"""Asynchronous training: workers in processes of their own (Ray actors) sample while this one trains.

The second driver over the calls of `verl.trainer.step`: its groups have been sampled when they are scored. A step
begins as many rollouts as may be under way, waits until `Schedule` has the groups of a step, trains on them, and hands
the new weights to the workers, which take them between two tokens: unfinished responses go on under the new weights. A
sample carries the version that wrote its first token; importance weights correct for later changes.

A group is scored as soon as it is here, also while an update goes on. Its scores are no part of a checkpoint: after a
resume it is scored again.

Not here: resampling of what an algorithm rejects (rejected groups make the step smaller), and episodes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack

from verl._base.checked import checked, validated
from verl._base.record import Count, Processes, Staleness
from verl._host.user_calls import Running
from verl.batch import Batch
from verl.checkpoint.schema import Count as SavedCount
from verl.checkpoint.schema import Saved
from verl.checkpoint.store import Checkpoint
from verl.cluster.ray.pool import check_range
from verl.dataflow.executor import Result
from verl.dataflow.loop import begin, run_sync
from verl.dataflow.schedule import Schedule
from verl.dataflow.scores import sample_metrics, written_tokens
from verl.errors import ConfigError, TrainingError
from verl.report.timeline import Span
from verl.roles.actor import Actor
from verl.roles.columns import expand
from verl.roles.critic import Critic
from verl.roles.standalone import Lost, RolloutPool
from verl.trainer.batches import next_batch
from verl.trainer.evaluation import Evaluation, Metrics
from verl.trainer.guard import SafetyGuard
from verl.trainer.tasks import check_asynchronous
from verl.trainer.trainer import Trainer
from verl.workers.standalone import EngineRecipe, Finished

if TYPE_CHECKING:
    from verl.keywords import TrainerArguments

#: Options of `Trainer` that mean nothing here, and what they are if they are not set.
_SYNCHRONOUS: dict[str, Any] = {"update_freq": None, "buffer": "memory", "buffer_size": None, "buffer_dir": "buffer"}


class ScheduleState(Saved):
    """`schedule.json`: the version of the weights, and at which version each group with samples was begun."""

    version: SavedCount
    began: dict[str, SavedCount]


class AsyncTrainer(Trainer):
    """`Trainer` with rollouts in standalone workers; `advance(prompts)` is a step, `fit(prompts, steps)` many.

    Args:
        batch_size: prompts that a step trains on.
        max_staleness: training steps that may pass between the begin of a sample's rollout and its own training.
        rollout_workers: processes that sample; `group.scale(n)` changes their number while training runs.
        max_rollout_workers: grow up to this number when sampling for a step takes longer than the rest of it, and
            fewer again, down to `rollout_workers`, when they are not needed; None: as many as `rollout_workers`.
        transport: how samples come to this process, "shared_memory" or "queue", see `RolloutPool`.
        **options: see `Trainer`; `num_rollout_workers` is another name of `rollout_workers`.

    Raises:
        ConfigError: the algorithm has no off-policy correction, or it is turned off; or an option of synchronous
            training (a buffer, `update_freq`) is set.
    """

    @checked
    def __init__(
        self,
        actor: Actor | Any,
        critic: Critic | Any = None,
        reward: Any = None,
        *,
        batch_size: Count,
        max_staleness: Staleness = 1,
        rollout_workers: Processes = 1,
        max_rollout_workers: Processes | None = None,
        transport: Literal["shared_memory", "queue"] = "shared_memory",
        **options: Unpack[TrainerArguments],
    ) -> None:
        if unused := [name for name, usual in _SYNCHRONOUS.items() if options.get(name, usual) != usual]:
            raise ConfigError(
                f"asynchronous training has a step for every batch_size groups and keeps no buffer: leave "
                f"{', '.join(unused)} out, or max_staleness"
            )
        if (same := options.pop("num_rollout_workers", None)) is not None:
            if rollout_workers not in (1, same):
                raise ConfigError(f"num_rollout_workers={same} is another name of rollout_workers={rollout_workers}")
            hints = {"num_rollout_workers": Processes}
            rollout_workers = validated("AsyncTrainer", hints, {"num_rollout_workers": same})["num_rollout_workers"]
        super().__init__(actor, critic, reward, **options)
        rollout = self.actor.rollout_options
        episode = self.task.episode or rollout.episode
        check_asynchronous(self.algorithm, rollout.name, episode, rollout.tensor_parallel)
        self.schedule: Schedule[Batch] = Schedule(batch_size, max_staleness)
        least, most = check_range(RolloutPool.role, rollout_workers, max_rollout_workers)
        self._make_group = partial(RolloutPool, size=least, most=most, transport=transport)
        self._group: RolloutPool | None = None
        self._starting = threading.Lock()
        self._prompts: dict[str, Batch] = {}  # of the groups that are not finished
        self._scores: dict[str, Future[Result]] = {}  # of the groups that wait for their step
        self._tokens, self._busy = 0, 0.0  # that have come since the latest step, and the seconds that they took
        self._failure: BaseException | None = None  # of a worker, during an update
        # Prompts are taken ahead of their step. A batch that is refused then must not end the steps whose prompts are
        # here already: the error is kept, and raised by the step that lacks those prompts.
        self._refused: ConfigError | None = None

    @property
    def group(self) -> RolloutPool:
        """The rollout workers, started at the first use. `group.scale(n)` makes them n; groups of
        workers that leave begin again elsewhere."""
        with self._starting:
            if self._group is None:
                self._group = self._make_group(EngineRecipe.of(self.actor))
                self._group.publish(self.actor.policy_version, self.actor.merged_shards())
            return self._group

    def step(self, prompts: Any) -> dict[str, Any]:
        raise ConfigError(
            "asynchronous training looks ahead in the prompts: call advance(iterator) or fit(iterator, n)"
        )

    def add_guard(self, guard: SafetyGuard) -> None:
        """Raises ConfigError: what the workers are sampling would be of weights that a rollback takes back."""
        raise ConfigError("a guard goes back between synchronous steps: use Trainer, or watch through on_log_hook")

    def advance(self, prompts: Iterator[Any]) -> dict[str, Any]:
        """Begin what may be begun, wait for a step's samples, train on them, publish the weights.

        Args:
            prompts: batches of `batch_size` prompts; some are taken ahead of the step that trains on them.

        Raises:
            DataError: there are no prompts for another step.
            ConfigError: the next batch of prompts has another size.
            ClusterError, RolloutError: see `RolloutPool.event`.
        """
        began = self._begin()
        self._feed(prompts)
        while not self.schedule.due:
            if len(self.schedule.untrained) < self.schedule.groups:  # no prompts came for them
                refused, self._refused = self._refused, None
                raise refused or self._no_prompts()
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            self._receive(self.group.event(self.limits.deadline))
            self._feed(prompts)
        waited = time.perf_counter() - began
        groups = {samples["group"][0]: samples for samples in self.schedule.take()}
        for name in (name for name in groups if name not in self._scores):  # of a checkpoint
            self._scores[name] = begin(self.task.score(groups[name]))
        scored = [self._scores.pop(name) for name in groups]
        samples = run_sync(self.task.from_rollout_workers(scored, f"s{self.steps}"))
        metrics = {**self._rollout_record(samples.draws[0].batch), "time/wait": waited}
        with self._receiving():
            record = self._learn_from({self.task.name: samples}, metrics)
        self.group.publish(self.actor.policy_version, self.actor.merged_shards())
        # Enough workers to sample a step's groups while the rest of a step goes on.
        self.group.fit(record["time/rollout"], time.perf_counter() - began - waited)
        return self._finish_step(record, began)

    def evaluate(self, prompts: Any, metrics: Metrics = None, **sampling: Any) -> Evaluation:
        """See `Trainer.evaluate`. It begins once no sample of a step is being scored: failures are counted apart."""
        wait(self._scores.values())
        return super().evaluate(prompts, metrics, **sampling)

    def close(self) -> None:
        for scores in self._scores.values():
            scores.cancel()
        self._scores.clear()
        self._tokens, self._busy, self._failure = 0, 0.0, None
        super().close()
        if self._group is not None:
            self._group.close()
            self._group = None
            for group in [*self.schedule.begun]:
                self.schedule.lose(group)

    def extra_files(self) -> dict[str, Any]:
        """Prompts whose samples have not come (they are sampled again), and samples that wait for their step."""
        ready = self.schedule.ready
        began = {group: began for group, (began, _) in ready.items()}
        return {
            "waiting.parquet": Batch.concat(self._prompts[group] for group in self.schedule.unfinished),
            "ready.parquet": Batch.concat(samples for _, samples in ready.values()),
            "schedule.json": {"version": self.schedule.version, "began": began},
        }

    def read_extra_files(self, checkpoint: Checkpoint, *, restore: bool) -> None:
        saved: ScheduleState = checkpoint.json("schedule.json", ScheduleState)
        waiting, ready = checkpoint.batch("waiting.parquet"), checkpoint.batch("ready.parquet")
        prompts = {waiting["group"][i]: waiting.slice(i, 1) for i in range(len(waiting))}
        samples = {ready["group"][rows[0]]: ready.take(rows) for rows in ready.group_indices() if len(ready)}
        if samples.keys() != saved.began.keys():
            raise checkpoint.damaged("schedule.json and ready.parquet name other groups")
        if not restore:
            return
        self.close()
        self._prompts, self._refused = prompts, None
        began = {group: (saved.began[group], samples[group]) for group in samples}
        self.schedule.restore(saved.version, list(prompts), began)
        # Prompts come by whole steps: where there is room for less, those that are here must be a step.
        if self.schedule.room < self.schedule.groups > len(self.schedule.untrained):
            raise ConfigError(
                f"the checkpoint has {len(self.schedule.untrained)} groups on their way, fewer than a step of "
                f"{self.schedule.groups}: go on with the batch_size and max_staleness that they were begun with"
            )

    def _feed(self, prompts: Iterator[Any]) -> None:
        while self._refused is None and self.schedule.room >= self.schedule.groups:
            if (rows := next_batch(prompts, self.limits.deadline)) is None:
                break  # the steps of what came before can still be taken
            batch = self.actor.prompts(rows, key=f"s{self.schedule.version}.{self.schedule.room}")
            batch = self.actor.prefixed(batch, self.algorithm)
            if len(batch) != self.schedule.groups:
                self._refused = ConfigError(
                    f"a batch of {len(batch)} prompts came, batch_size is {self.schedule.groups}"
                )
                break
            for row, group in enumerate(batch["group"]):
                self.schedule.accept(group)
                self._prompts[group] = batch.slice(row, 1)
        params = {name: getattr(self.sampling, name) for name in self.sampling.__dataclass_fields__}
        while (begun := self.schedule.begin()) is not None:
            rows = expand(self._prompts[begun], self.n, self.algorithm.greedy_baseline)
            self.group.submit(begun, rows, params)

    def _receive(self, event: Finished | Lost, writer: tuple[int, str] | None = None) -> None:
        if isinstance(event, Finished):
            samples = self.actor.with_policy_version(event.samples, writer)
            self._scores[event.group] = begin(self.task.score(samples))
            self.schedule.finish(event.group, samples)
            del self._prompts[event.group]
            self._tokens += written_tokens(samples)
            self._busy += sum(end - start for start, end in event.busy)
            self.runner.add([Span("rollout", "rollout", start, end - start, event.worker) for start, end in event.busy])
        else:
            for group in event.groups:
                self.schedule.lose(group)

    @contextmanager
    def _receiving(self) -> Iterator[None]:
        """Inside, a thread takes what the workers finish, so that it is scored during an update. Where a worker fails,
        the next step that waits says so."""
        # The update changes the actor's version before its end, and these samples are of the one before.
        writer = self.actor.policy_version, self.actor.policy_id
        is_over = threading.Event()

        def receive() -> None:
            while not is_over.is_set():
                with suppress(queue.Empty):
                    if (event := self.group.poll(1.0)) is not None:
                        self._receive(event, writer)

        receiving = Running(receive, name="finished-groups")
        try:
            yield
        finally:
            is_over.set()
            self.group.wake()
            self._failure = receiving.exception()

    def _rollout_record(self, samples: Batch) -> dict[str, Any]:
        staleness = self.actor.policy_version - min(samples["policy_version"])
        if staleness > self.schedule.max_staleness:
            raise TrainingError(
                f"a sample is {staleness} versions old, at most {self.schedule.max_staleness} was asked for: a rollout "
                "worker samples with weights that it should have replaced"
            )
        (tokens, busy), (self._tokens, self._busy) = (self._tokens, self._busy), (0, 0.0)
        return {
            "rollout/staleness/max": staleness,
            "rollout/staleness": self.actor.policy_version - sum(samples["policy_version"]) / len(samples),
            "rollout/workers": self.group.size,
            "rollout/tokens": tokens,
            "rollout/tokens_per_s": tokens / busy if busy else 0.0,
            "time/rollout": busy,
            **sample_metrics(samples),
        }
