"""`verl train`: a run from settings to report, which the same command continues wherever it was cut off."""

from __future__ import annotations

import logging
import math
import platform
import shlex
import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from verl.batch import Batch
from verl.config import Config, config_hash, run_id, to_yaml
from verl.controller.controller import Controller
from verl.controller.once import on_main
from verl.controller.ranks import is_main, rank_here, torchrun_ranks
from verl.data.files import digest
from verl.data.prompts import PromptDataset
from verl.errors import CheckpointError, ConfigError, DataError, ModelError, VerlError
from verl.models.memory import peak_memory
from verl.trainer import build, state
from verl.trainer.check import Checked, check_settings
from verl.trainer.checkpoint import Checkpoint, CheckpointStore
from verl.trainer.evaluation import MetricFn, binomial_interval, paired_bootstrap, save_completions
from verl.trainer.logging import Logger, open_logger, setup_logging
from verl.trainer.report import SHARES, finite, write_report
from verl.trainer.rng import seed_everything
from verl.trainer.run_dir import Run, open_run
from verl.trainer.signals import StopSignal
from verl.trainer.timeline import Timeline

logger = logging.getLogger(__name__)

_COMPLETION_COLUMNS = ("id", "prompt", "response", "reward", "finish")
_TOTALS = ("rollout/tokens", "time/rollout", "train/tokens", "time/update")


def train(config: Config, *, fresh: bool = False) -> dict[str, Any]:
    """Run to the end, or on to the end if it was interrupted; prints a table and returns the summary.

    Args:
        fresh: start anew even if the run is unfinished.

    Raises:
        VerlError: what stops a run, by the boundary where it arose.
        SystemExit: a signal asked for the end; a checkpoint has been written.
    """
    trainer = config.trainer
    seed_everything(trainer.seed)
    checked = check_settings(config)
    if trainer.threads is not None:
        torch.set_num_threads(trainer.threads)
    controller = Controller(trainer.placement, timeout=trainer.deadline)
    controller.start()
    opened = partial(
        open_run,
        trainer.output_dir,
        run_id(config),
        config=to_yaml(config),
        total_steps=trainer.total_steps,
        fresh=fresh,
    )
    run = on_main("run directory", opened)
    with run if is_main() else nullcontext():
        setup_logging(run.log_of(rank_here()))
        controller.each(setup_logging, lambda rank: run.log.with_suffix(f".rank{rank}.log"))
        logger.info("run directory %s (%s, attempt %d)", run.path, run.status, run.attempt)
        job = None
        try:
            job = _Job(config, checked, run, controller)
            return job.execute()
        except Exception as error:
            # Where another library's error is the cause, its traceback says more, unless the message is for the user.
            is_told = isinstance(error, ConfigError | DataError) or (
                isinstance(error, VerlError) and isinstance(error.__cause__, VerlError | None)
            )
            logger.log(logging.DEBUG if is_told else logging.ERROR, "the run ended with an error", exc_info=True)
            if job is None and isinstance(error, ConfigError | DataError | ModelError) and is_main():
                run.discard()
            raise
        finally:
            if run.path.exists():
                _report(run)
            controller.close()


class _Job:
    """One attempt at a run."""

    def __init__(self, config: Config, checked: Checked, run: Run, controller: Controller) -> None:
        self.config = config
        self.run = run
        self.controller = controller
        algorithm, rows = checked.algorithm, checked.rows
        self.eval_metrics: dict[str, MetricFn] = {"accuracy": _accuracy, **checked.metrics}
        actor = build.build_actor(config, algorithm, rows, controller)
        build.check_memory(config, algorithm, actor)
        self.data = build.build_data(config, actor, checked)
        for note in self.data.notes:
            logger.warning("%s", note)
        if config.trainer.total_steps == 0:
            logger.warning("trainer.total_steps is 0: this run evaluates and trains nothing")
        self.store = CheckpointStore(run.checkpoints, config.trainer.keep_checkpoints)
        self.trainer = build.build_trainer(config, algorithm, actor, rows, open_logger(None, ()))
        if not controller.is_local:
            logger.info(
                "%d ranks:\n%s", len(controller.mesh.slots), controller.mesh.picture(build.placed_roles(algorithm))
            )
        if config.trainer.timeline and is_main():
            self.trainer.timeline = Timeline(run.path / "timeline.json")
        self.totals = dict.fromkeys(_TOTALS, 0.0)
        self.seconds = 0.0
        self.before: dict[str, Any] | None = None
        self.held_out = self._held_out()
        self.committed = self._resume()
        if is_main():
            self.trainer.use_logger(self._logger())
            run.note_environment(_environment())

    def _logger(self) -> Logger:
        settings, run = self.config.trainer, self.run
        return open_logger(
            run.path,
            settings.loggers,
            run_id=run.path.name,
            project=settings.project,
            config=_flat(self.config.model_dump(mode="json")),
            total_steps=settings.total_steps,
            resume_step=-1 if self.committed is None and run.status == "resumed" else self.committed,
        )

    def _held_out(self) -> dict[str, Any] | None:
        """What tells the held-out data from others."""
        data = self.data.held_out
        if data is None:
            return None
        return {"rows": len(data), "digest": digest(data.rows()) if isinstance(data, Batch) else data.fingerprint()}

    def execute(self) -> dict[str, Any]:
        """Evaluate, train, evaluate; with a checkpoint wherever it may have to stop."""
        settings, trainer = self.config.trainer, self.trainer
        try:
            with StopSignal() as stop:
                if self.before is None and self.data.held_out is not None:
                    self.before = self._evaluate()
                stopping = self._asked_to_stop(stop)
                while trainer.steps < settings.total_steps and not stopping:
                    self._step()
                    stopping = self._asked_to_stop(stop)
                    if trainer.steps % (settings.save_every or math.inf) == 0:
                        self._save()
                if not stopping:  # before it is saved, so that the same command does not take it for trained
                    on_main("failures", trainer.check_failures)
                if self.committed != trainer.steps:
                    self._save()
                if stopping:
                    logger.info("stopped by %s after step %d; the same command goes on", stop.received, trainer.steps)
                    raise SystemExit(stop.exit_code)
                after = self._evaluate() if self.data.held_out is not None else None
                on_main("failures", trainer.check_failures)
        finally:
            trainer.close()
            trainer.logger.close()
        summary = self._summary(after)
        if is_main():
            self.run.finish(summary, steps=trainer.steps)
            _print_table(summary, self.run.path, _report(self.run))
        return summary

    def _asked_to_stop(self, stop: StopSignal) -> bool:
        """Whether a signal has reached any rank: all end after the same step."""
        return stop.requested if torchrun_ranks() == 1 else self.controller.world().anywhere("stop", stop.requested)

    def _resume(self) -> int | None:
        """The step of the checkpoint that the run goes on from; None: it starts at the beginning."""
        identity = {**state.identity(self.trainer), "settings": config_hash(self.config)}
        checkpoint = on_main("load", lambda: self.store.load(identity, partial(state.check, self.trainer)))
        if checkpoint is not None:
            self._restore(checkpoint)
        step = -1 if checkpoint is None else checkpoint.step
        if is_main():  # once nothing is refused any more
            self.run.rewind(step, evaluates=step >= self.config.trainer.total_steps)
        return None if checkpoint is None else step

    def _restore(self, checkpoint: Checkpoint) -> None:
        extra: dict[str, Any] = checkpoint.json("trainer.json")["extra"]
        if "held_out" in extra and extra["held_out"] != self.held_out:
            raise DataError(
                f"data.eval ({self.config.data.eval}) is not what the run began with: the held-out rows were "
                f"{_told(extra['held_out'])}, are {_told(self.held_out)}, so that the numbers before and after would "
                "not be of the same problems. Give the same data, or start anew (--fresh)"
            )
        state.restore(self.trainer, checkpoint)
        self.data.train.load_state_dict(extra["loader"])
        self.totals, self.seconds, self.before = extra["totals"], extra["seconds"], extra["before"]
        logger.info("going on from step %d", checkpoint.step)

    def _step(self) -> None:
        began = time.perf_counter()
        record = self.trainer.advance(self.data.train)
        for name in _TOTALS:
            self.totals[name] += float(record.get(name, 0.0))
        self.seconds += time.perf_counter() - began
        settings = self.config.trainer
        is_due = settings.eval_every and self.trainer.steps % settings.eval_every == 0
        if is_due and self.data.held_out is not None and self.trainer.steps < settings.total_steps:
            self._evaluate()

    def _save(self) -> None:
        extra = {
            "loader": self.data.train.state_dict(),
            "totals": self.totals,
            "seconds": self.seconds,
            "before": self.before,
            "held_out": self.held_out,
        }
        identity = {**state.identity(self.trainer), "settings": config_hash(self.config)}
        files, step = state.contents(self.trainer, extra), self.trainer.steps
        result = on_main(f"save step {step}", lambda: self.store.save(step, files, identity))
        if result:
            self.committed = self.trainer.steps
        elif self.trainer.steps >= self.config.trainer.total_steps:
            raise CheckpointError(f"{result.error}; the run is trained but not saved: free space and run it again")

    def _evaluate(self) -> dict[str, Any]:
        """Metrics of what is held out, now; noted in eval.jsonl."""
        held_out, step = self.data.held_out, self.trainer.steps
        assert held_out is not None
        self.trainer.logger.phase(f"evaluating {len(held_out)} held-out rows")
        began = time.perf_counter()
        found = self._evaluate_loss(held_out) if isinstance(held_out, Batch) else self._evaluate_samples(held_out)
        self.seconds += time.perf_counter() - began
        headline, metrics = found["headline"], found["metrics"]
        row: dict[str, Any] = {"step": step, "headline": headline, **metrics, "problems": found["problems"]}
        if headline in SHARES:
            scored = [value for value in found.get("by_problem", ()) if value is not None]
            count = len(scored) or found["problems"]
            # A sum over micro-batches rounds, and may come to a little more than all.
            share = binomial_interval(min(metrics[headline], 1.0) * count, count)
            row |= {"low": share.low, "high": share.high}
        if is_main():
            self.run.note_evaluation(row)
        self.trainer.logger.log(step, {f"eval/{name}": value for name, value in metrics.items()})
        return found

    def _evaluate_samples(self, held_out: PromptDataset) -> dict[str, Any]:
        """By samples that are scored, and kept to be read."""
        settings = self.config.trainer
        found = self.trainer.evaluate(
            held_out.batch, self.eval_metrics, n=settings.eval_n, temperature=settings.eval_temperature
        )
        if is_main():
            save_completions(
                _readable(found.samples, held_out, self.trainer.actor.tokenizer),
                self.run.completions / f"step-{self.trainer.steps:06d}.parquet",
                limit=settings.log_completions,
                columns=_COMPLETION_COLUMNS,
            )
        headline = "accuracy" if any(value is not None for value in found.rows["accuracy"]) else "reward"
        by_problem = found.by_problem(headline)
        metrics = finite(found.metrics)
        return {"headline": headline, "metrics": metrics, "problems": len(by_problem), "by_problem": by_problem}

    def _evaluate_loss(self, held_out: Batch) -> dict[str, Any]:
        """By the loss of recorded rows, and how often a chosen response beats a rejected one."""
        metrics = finite(self.trainer.evaluate_loss(held_out))
        headline = "pairs/accuracy" if metrics.get("pairs/accuracy") is not None else "loss"
        return {"headline": headline, "metrics": metrics, "problems": len(held_out.group_indices())}

    def _summary(self, after: Mapping[str, Any] | None) -> dict[str, Any]:
        totals = self.totals
        summary: dict[str, Any] = {
            "seconds": self.seconds,
            "train_tokens_per_second": totals["train/tokens"] / max(totals["time/update"], 1e-9),
            "peak_memory_bytes": peak_memory(),
            "control": self.config.trainer.control,
        }
        if totals["time/rollout"]:
            summary["rollout_tokens_per_second"] = totals["rollout/tokens"] / totals["time/rollout"]
        if after is None or self.before is None:
            return summary
        name = after["headline"]
        before_value, after_value = self.before["metrics"][name], after["metrics"][name]
        summary |= {"headline": name, f"{name}_before": before_value, f"{name}_after": after_value}
        summary |= {"eval_problems": after["problems"]}
        if "by_problem" in after:
            summary |= dict.fromkeys(("gain", "gain_low", "gain_high"))
            before, values = self.before["by_problem"], after["by_problem"]
            # What abstained has no value, and two headlines are no pair.
            if name == self.before["headline"] and any(None not in pair for pair in zip(before, values, strict=False)):
                gain = paired_bootstrap(before, values, seed=self.config.trainer.seed)
                summary |= {"gain": gain.value, "gain_low": gain.low, "gain_high": gain.high}
        return summary


def _accuracy(samples: Batch) -> list[float | None]:
    """Exact match by the task's own verifier, for rewards that tell it; no credit for a format."""
    if "reward/accuracy" in samples:
        values = samples["reward/accuracy"]
        if all(value is None or 0 <= value <= 1 for value in values):  # a user's component of that name may be no share
            return values
    return [None] * len(samples)


def _readable(samples: Batch, held_out: Any, tokenizer: Any) -> Batch:
    """Samples with their prompts as text."""
    texts = held_out.texts()
    prompts = [texts[int(group.rpartition(".")[2])] for group in samples["group"]]
    return samples.drop(["prompt"]).add({"prompt": prompts})


def _told(held_out: Mapping[str, Any] | None) -> str:
    return "none" if held_out is None else f"{held_out['rows']} with the digest {held_out['digest']}"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        flat.update(_flat(value, f"{key}.") if isinstance(value, dict) else {key: value})
    return flat


def _environment() -> dict[str, Any]:
    import transformers

    import verl

    return {
        "verl": verl.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
    }


def _report(run: Run) -> Path | None:
    """Write the report, as far as the run has come; a failed run's report is the one that is wanted most."""
    if not is_main():
        return None
    try:
        return write_report(run.path)
    except (DataError, OSError) as error:
        logger.warning("no report was written: %s", error)
        return None


def _print_table(summary: Mapping[str, Any], run: Path, page: Path | None) -> None:
    table = Table(title="result", show_header=False)
    if "headline" in summary:
        name = summary["headline"]
        form = "{:.1%}" if name in SHARES else "{:.4f}"
        unit, points = (100, " points") if name in SHARES else (1, "")
        for when in ("before", "after"):
            value = summary[f"{name}_{when}"]
            table.add_row(f"{name} {when}", "-" if value is None else form.format(value))
        if summary.get("gain") is not None:
            gain, low, high = (unit * summary[key] for key in ("gain", "gain_low", "gain_high"))
            table.add_row("gain", f"{gain:+.1f}{points}  (95 % interval {low:+.1f} to {high:+.1f})")
        elif "gain" in summary:
            table.add_row("gain", "-")
        table.add_row("held-out problems", str(summary["eval_problems"]))
    if "rollout_tokens_per_second" in summary:
        table.add_row("generated", f"{summary['rollout_tokens_per_second']:,.0f} tokens/s")
    table.add_row("trained", f"{summary['train_tokens_per_second']:,.0f} tokens/s")
    table.add_row("peak memory", f"{summary['peak_memory_bytes'] / 1e9:.2f} GB")
    table.add_row("time", f"{summary['seconds'] / 60:.1f} minutes")
    if summary["control"]:
        table.add_row("control", str(summary["control"]))
    if page is not None:
        table.add_row("report", str(page))
    console = Console(soft_wrap=True)
    console.print(table)
    # Outside of the table, which would break it: it is there to be copied.
    console.print(f"the trained model: verl export {shlex.quote(str(run))} OUT", markup=False, highlight=False)
