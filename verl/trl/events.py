"""`transformers.TrainerCallback`s over our trainer: its events, its state, and its log records by TRL's names."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from statistics import stdev
from typing import Any

from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import speed_metrics

from verl.algorithms.responses import Responses
from verl.batch import Batch
from verl.errors import ConfigError, shown
from verl.trainer.task import Samples
from verl.trainer.trainer import Trainer
from verl.trl.entries import whole

logger = logging.getLogger(__name__)

#: TRL's name of a metric -> ours.
_NAMES = {
    "loss": "loss/actor",
    "grad_norm": "grad_norm/actor",
    "learning_rate": "lr/actor",
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "frac_reward_zero_std": "reward/groups_alike",
    "completions/mean_length": "response/length",
    "completions/min_length": "response/length_min",
    "completions/max_length": "response/length_max",
    "completions/clipped_ratio": "response/cut",
    "step_time": "time/step",
    "policy_loss": "loss/policy",
}


def by_trl_names(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record, once more under TRL's names where it has one."""
    numbers = {name: float(v) for name, v in record.items() if isinstance(v, int | float) and math.isfinite(v)}
    named = {theirs: numbers[ours] for theirs, ours in _NAMES.items() if ours in numbers}
    parts = {
        f"rewards/{name.removeprefix('reward/')}": value
        for name, value in numbers.items()
        if name.startswith("reward/") and name.endswith("/mean") and name != "reward/mean"
    }
    return {**numbers, **parts, **named}


def of_samples(batch: Batch) -> dict[str, float]:
    """What TRL logs of completions besides the record of a step: the spread of each reward, lengths of those that
    ended, and the calls of tools."""
    numbers = {}
    for column in (column for column in batch.columns if column == "reward" or column.startswith("reward/")):
        values = [value for value in batch[column] if value is not None]
        entry = "reward_std" if column == "reward" else f"rewards/{column.removeprefix('reward/')}/std"
        numbers[entry] = stdev(values) if len(values) > 1 else 0.0
    if "finish" in batch:
        lengths = zip(batch.lengths("response_tokens"), batch["finish"], strict=True)
        ended = [float(length) for length, finish in lengths if finish != "length"] or [0.0]
        for name, value in (("mean", sum(ended) / len(ended)), ("min", min(ended)), ("max", max(ended))):
            numbers[f"completions/{name}_terminated_length"] = value
    if "conversation" in batch:
        results = [json.loads(turns) for turns in batch["conversation"] if turns is not None]
        answers = [turn for turns in results for turn in turns if turn.get("role") == "tool"]
        failed = sum(str(turn.get("content", "")).startswith("{'error'") for turn in answers)
        numbers["tools/call_frequency"] = len(answers) / max(len(batch), 1)
        numbers["tools/failure_frequency"] = failed / max(len(answers), 1)
    return numbers


class Events:
    """The callbacks and the log of a trainer: calls them, and does what their `control` asks for.

    Attributes:
        state: `transformers.TrainerState`: `global_step`, `epoch`, `log_history`, ...
        updates: optimizer steps of one step of `trainer`.
    """

    args: Any
    trainer: Trainer
    eval_dataset: Any
    updates: int = 1
    #: Metrics of held-out data, as `Trainer` names them.
    _evaluate: Callable[[Any], Mapping[str, Any]]
    _total: int
    _per_epoch: float
    #: Steps of `trainer` from one evaluation to the next; 0: none.
    _eval_every = 0
    _saved: int | None = None
    _has_warned = False

    def _observe(self, args: Any, callbacks: Iterable[Any], about: Mapping[str, Any]) -> None:
        """Begin to; callbacks get these arguments, and `about` (`model`, `processing_class`) as further keywords."""
        self.callbacks: list[Any] = []
        self._given, self._about = args, about
        epochs = math.ceil(self._total / self._per_epoch)
        self.state = TrainerState(max_steps=self._total * self.updates, num_train_epochs=epochs)
        self.control = TrainerControl()
        self._since: list[dict[str, float]] = []
        self._losses: list[float] = []
        self._measured: dict[str, list[float]] = {}
        self._of_samples: dict[str, float] = {}
        for callback in callbacks:
            self.add_callback(callback)

    def add_callback(self, callback: Any) -> None:
        """Raises ConfigError if it is no `TrainerCallback`."""
        instance = callback() if isinstance(callback, type) else callback
        if not isinstance(instance, TrainerCallback):
            raise ConfigError(f"a callback is a transformers.TrainerCallback, not {shown(callback)}")
        self.callbacks.append(instance)

    def call_event(self, event: str, **more: Any) -> None:
        for callback in self.callbacks:
            answer = getattr(callback, event)(self._given, self.state, self.control, **self._about, **more)
            self.control = answer or self.control

    def _begin(self) -> None:
        steps = self.trainer.steps
        self.state.global_step, self.state.epoch = steps * self.updates, steps / self._per_epoch
        self._begun, self._first, self._losses = time.time(), self.state.global_step, []
        self.control.should_training_stop = False
        self.call_event("on_train_begin")
        self.call_event("on_epoch_begin")
        if self._eval_every and steps == 0:
            self._evaluate_and_log()

    def _finish(self) -> dict[str, float]:
        """Loss and speed of this call of `train`, by transformers' names. As there, the last entry has what was
        measured since the one before it."""
        self._note_save()
        if self._eval_every and self.trainer.steps % self._eval_every:
            self._evaluate_and_log()
        steps = self.state.global_step - self._first
        speed = speed_metrics("train", self._begun, steps * self.args.samples(), steps)
        loss = sum(self._losses) / len(self._losses) if self._losses else 0.0
        summary = {**speed, "total_flos": 0.0, "train_loss": loss}
        self._write(self._means() | summary)
        self.call_event("on_train_end")
        return summary

    def note_samples(self, batch: Batch) -> None:
        """Those of a step."""
        self._of_samples = of_samples(batch)
        # KTO's rows with another response are none of the data.
        rows = batch.filter([not other for other in batch["mismatched"]]) if "mismatched" in batch else batch
        self.state.num_input_tokens_seen += sum(map(sum, map(rows.lengths, ("prompt_tokens", "response_tokens"))))
        self._of_samples["num_tokens"] = float(self.state.num_input_tokens_seen)
        if coefficient := getattr(self.args, "entropy_coef", 0.0):
            self._of_samples["entropy_coef"] = coefficient
        unscored = [reward is None for reward in batch["reward"]] if "reward" in batch else []
        if any(unscored) and not self._has_warned:
            self._has_warned = True
            row = next(iter(batch.filter(unscored).rows()))
            logger.warning("All reward functions returned None for the following kwargs: %.1000s", row)

    def after_step(self, record: Mapping[str, Any]) -> None:
        """After a step of `trainer`."""
        state, trainer, epoch = self.state, self.trainer, math.floor(self.state.epoch or 0)
        state.global_step, state.epoch = trainer.steps * self.updates, trainer.steps / self._per_epoch
        measured = {name: sum(values) / len(values) for name, values in self._measured.items()}
        self._since.append(by_trl_names(record) | self._of_samples | measured)
        self._measured.clear()
        self._losses += [self._since[-1]["loss"]] if "loss" in self._since[-1] else []
        self.call_event("on_step_end")
        every = self.args.logging_steps  # optimizer steps; below 1 a share of all
        every = max(1, math.ceil(every * state.max_steps) if every < 1 else round(every))
        is_due = state.global_step // every > (state.global_step - self.updates) // every
        if (self.control.should_log or is_due) and (means := self._means()):
            self._write(means)
        self._note_save()
        if self.control.should_save and trainer.checkpoints is not None:
            trainer.checkpoints.save(trainer)
            self._note_save()
        if self._eval_every and (self.control.should_evaluate or trainer.steps % self._eval_every == 0):
            self._evaluate_and_log()
        if math.floor(state.epoch) > epoch:
            self.call_event("on_epoch_end")
            self.call_event("on_epoch_begin")
        self.control.should_log = self.control.should_save = self.control.should_evaluate = False
        if self.control.should_training_stop or self.control.should_epoch_stop:
            trainer.stop()

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Measure held-out data; the metrics, whose names begin with `eval_`, of several by name with `eval_NAME_`.

        Raises:
            ConfigError: there is no such data.
        """
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if rows is None:
            raise ConfigError("evaluate() needs data: give the trainer eval_dataset=..., or evaluate(data)")
        sets = {f"eval_{name}_": rows[name] for name in rows} if isinstance(rows, Mapping) else {"eval_": rows}
        return {name: value for prefix, of in sets.items() for name, value in self._measure(of, prefix).items()}

    def _measure(self, rows: Any, prefix: str) -> dict[str, float]:
        began, size = time.time(), len(rows) if hasattr(rows, "__len__") else None
        metrics = {**whole(self._evaluate(rows)), "num_tokens": float(self.state.num_input_tokens_seen)}
        named = {f"{prefix}{name}": value for name, value in by_trl_names(metrics).items()}
        steps = None if size is None else math.ceil(size / (self.args.per_device_eval_batch_size or 8))
        named |= speed_metrics(prefix.removesuffix("_"), began, size, steps)
        self._write(named)
        self.call_event("on_evaluate", metrics=named)
        return named

    def _evaluate_and_log(self) -> None:
        measured = {f"eval/{name.removeprefix('eval_')}": value for name, value in self.evaluate().items()}
        self.trainer.logger.log(self.trainer.steps, measured)

    def log_metric(self, name: str, value: float) -> None:
        """A number of a reward function, of which the log gets the mean."""
        self._measured.setdefault(name, []).append(float(value))

    def _means(self) -> dict[str, float]:
        """The means of the steps since the last time; of what transformers reads at the end, the last."""
        names = dict.fromkeys(name for record in self._since for name in record)
        values = {name: [record[name] for record in self._since if name in record] for name in names}
        self._since.clear()
        means = {name: sum(of) / len(of) for name, of in values.items()}
        last = ("grad_norm", "learning_rate", "num_tokens")
        return means | {name: values[name][-1] for name in last if name in values}

    def _write(self, logs: dict[str, float]) -> None:
        logs = {**logs, "epoch": float(self.state.epoch or 0)}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.call_event("on_log", logs=logs)

    def _note_save(self) -> None:
        """Once for each checkpoint: call callbacks, and name checkpoints as transformers does, too, whose
        `get_last_checkpoint` scripts call: `checkpoint-N`, of N optimizer steps, is a link to each. One whose
        checkpoint is gone is taken away."""
        checkpoints = self.trainer.checkpoints
        if checkpoints is None or checkpoints.saved in (None, self._saved):
            return
        self._saved, folder = checkpoints.saved, checkpoints.store.directory
        with suppress(OSError):  # not every file system has links
            for link in folder.glob("checkpoint-*"):
                if link.is_symlink() and not link.exists():
                    link.unlink()
            for path in folder.glob("step-*"):
                link = folder / f"checkpoint-{int(path.name.removeprefix('step-')) * self.updates}"
                if not link.exists():
                    link.symlink_to(path.name)
        self.call_event("on_save")


class ObservedTrainer(Trainer):
    """`Trainer` that reports its steps to `events`, and whose updates have TRL's entries."""

    events: Events

    def learn(self, samples: Batch | Mapping[str, Batch]) -> dict[str, Any]:
        metrics: dict[str, Any] = whole(super().learn(samples))
        latest, kl_in = self.latest, getattr(self.task.algorithm, "kl_in", "none")
        if kl_in == "reward" and latest is not None and "update/empty" not in metrics:
            # Mean over the tokens of samples of the log-ratio of the policy that wrote them to the reference.
            responses = Responses(latest[1][self.task.name])
            ratio = responses.tokens("old_log_probs") - responses.tokens("ref_log_probs")
            metrics["kl"] = float(ratio[responses.written].mean())
        return metrics

    def _learn_from(self, samples: Mapping[str, Samples], *args: Any) -> dict[str, Any]:
        self.events.note_samples(samples[self.task.name].rows)
        return super()._learn_from(samples, *args)

    def advance(self, prompts: Iterator[Any]) -> dict[str, Any]:
        self.events.call_event("on_step_begin")
        record = super().advance(prompts)
        self.events.after_step(record)
        return record
