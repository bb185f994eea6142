"""`verl train`: a run from settings to report, which the same command continues wherever it was cut off."""

from __future__ import annotations

import logging
import math
import os
import platform
import shlex
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import verl
from verl._base.durable import digest
from verl._base.secrets import masked_settings
from verl._host.device import default_kind
from verl._host.log import setup_logging
from verl._host.user_calls import Running
from verl._host.user_functions import load_function, new_user_files, shown_path, user_files
from verl.batch import Batch
from verl.cluster.controller import Controller
from verl.config import Config, config_hash, run_id, to_yaml
from verl.config.document import flat
from verl.config.schema import KL
from verl.data.prefetch import Loader
from verl.data.prompts import PromptDataset
from verl.errors import ConfigError, DataError, ModelError, VerlError
from verl.kernels.build import library
from verl.report.completions import save_table
from verl.report.page import REFRESH_SECONDS, SHARES, scale, value_text, write_report
from verl.report.reading import read_rows
from verl.report.sinks import open_logger
from verl.run.build import Checked, build_actor, build_trainer, check_settings, placed_roles
from verl.run.data import build_data, in_steps
from verl.run.folder import Run, open_run
from verl.run.memory import check_memory
from verl.run.planned import reward_models
from verl.run.resolved import resolve
from verl.trainer.evaluation import Evaluation, HeldOut, accuracy
from verl.trainer.trainer import Trainer
from verl.workers.actor import ActorWorker

logger = logging.getLogger(__name__)

#: Of a model's directory: what a model, a tokenizer and their own code are made from, and the weights.
_SMALL, _WEIGHTS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"), (".safetensors", ".bin")
_COMPLETION_COLUMNS = ("id", "prompt", "response", "reward", "finish")


def train(
    config: Config, *, fresh: bool = False, accept_edits: bool = False, began: float | None = None
) -> dict[str, Any]:
    """Run to the end, or on to the end if it was interrupted; prints a table and returns the summary.

    Args:
        fresh: start a new run even if there is an unfinished one.
        accept_edits: go on even if files of the user's code were edited since the run began.
        began: when the command began, by `time.monotonic`; None: now.

    Raises:
        VerlError: what stops a run, by the boundary where it arose.
        SystemExit: by a signal, after a checkpoint.
    """
    began = time.monotonic() if began is None else began
    transformers.set_seed(config.trainer.seed)  # for the user's code; what the system draws has seeds of its own
    checked = check_settings(config)
    epochs, config = config.trainer.total_epochs, in_steps(config, checked.data)
    settings = config.trainer
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    controller = Controller(settings.placement, timeout=settings.deadline)
    controller.start()
    kernels = Running(library, name="compile") if controller.is_local and default_kind() == "cpu" else None
    run = open_run(
        settings.output_dir,
        run_id(config),
        config=to_yaml(config),
        total_steps=settings.total_steps,
        fresh=fresh or not settings.resume,
    )
    with run:
        _log_into(run, controller)
        trainer: Trainer | None = None
        report = _LiveReport(run)
        try:
            # Before models are loaded: a run whose code has changed is refused within seconds.
            run.note_code(*inputs_of(config), accept_edits=accept_edits)
            trainer, prompts = _open_trainer(config, checked, run, controller, epochs)
            trainer.on_log_hook(report)
            trainer.on_log_hook(lambda step, record: run.note_late(new_user_files()))
            first, loaded = trainer.steps, time.monotonic()
            if kernels is not None:
                kernels.exception()  # training would wait for them
            compiled = time.monotonic()
            trainer.fit(prompts, settings.total_steps - trainer.steps)
            trainer.logger.close()  # the summary is of all rows, so they are on disk first
            summary = _summary(config, trainer, run)
            run.finish(summary, steps=trainer.steps)
            page = report.write()
            rows = [row for row in read_rows(run.metrics) if row["step"] > first or first == 0]
            _print_table(summary, run.path, page, _seconds((began, loaded, compiled), rows, report.seconds))
            return summary
        except Exception as error:
            # Where another library's error is the cause, its traceback says more, unless the message is for the user.
            is_plain = isinstance(error, ConfigError | DataError) or (
                isinstance(error, VerlError) and isinstance(error.__cause__, VerlError | None)
            )
            logger.log(logging.DEBUG if is_plain else logging.ERROR, "the run ended with an error", exc_info=True)
            # A run that never began leaves no directory; one that failed later keeps what it has.
            if trainer is None and isinstance(error, ConfigError | DataError | ModelError):
                run.discard()
            raise
        finally:
            if trainer is not None:
                trainer.close()
                trainer.logger.close()
            if run.path.exists() and not report.is_last:
                report.write()
            controller.close()


def _log_into(run: Run, controller: Controller) -> None:
    """Every process logs into a file of the run."""
    setup_logging(run.log)
    if not controller.is_local:
        first = run.log if controller.executor == "torchrun" else run.log.with_suffix(".rank0.log")
        others = [run.log.with_suffix(f".rank{rank}.log") for rank in range(1, controller.size)]
        controller.everywhere(setup_logging, each=[(log,) for log in (first, *others)])
    logger.info("run directory %s (%s, attempt %d)", run.path, run.status, run.attempt)


def _open_trainer(
    config: Config, checked: Checked, run: Run, controller: Controller, epochs: int | None
) -> tuple[Trainer, Loader]:
    """The trainer where the run's newest checkpoint left it, and its prompts."""
    settings, tasks, rows, identity = config.trainer, checked.tasks, checked.rows, config_hash(config)
    algorithms = [task.algorithm for task in tasks]
    # The identity is of the settings as written; "auto" may come out differently on another machine.
    config = resolve(config, run.path)
    actor = build_actor(config, algorithms[0].head, rows, controller)
    check_memory(config, algorithms, actor)
    prompts, held_out, notes = build_data(config, actor, checked.data, epochs)
    if epochs is not None:
        count = f"{epochs} epoch{'s' * (epochs > 1)} of {checked.data.rows} rows"
        logger.info("%s in batches of %d: %d steps", count, config.data.batch_size, settings.total_steps)
    for note in notes:
        logger.warning("%s", note)
    if settings.total_steps == 0:
        logger.warning("trainer.total_steps is 0: this run evaluates and trains nothing")
    trainer = build_trainer(
        config,
        tasks,
        actor,
        rows,
        checkpoint_dir=run.checkpoints,
        save_every=settings.save_every or max(settings.total_steps, 1),
        keep_checkpoints=settings.keep_checkpoints,
        held_out=None if held_out is None else _held_out(config, checked, run, held_out),
        timeline=run.path / "timeline.json" if settings.timeline else None,
    )
    trainer.settings = identity
    # An engine is chosen by the loaded model, so only now; a resumed run keeps the one it began with.
    if actor.head == "lm" and any(algorithm.online for algorithm in algorithms):
        config = resolve(config, run.path, actor)
    if not controller.is_local:
        sources = {role for task in trainer.tasks.values() for role in task.sources}
        roles = [*placed_roles(config, algorithms), *sorted(sources & controller.mesh.pools.keys())]
        logger.info("%d ranks:\n%s", len(controller.mesh.devices), controller.mesh.picture(roles))
    step = None
    if run.status == "resumed":
        step = trainer.resume(prompts)
        if trainer.position is not None:
            prompts.load_state_dict(trainer.position)  # which refuses other prompts
        run.rewind(-1 if step is None else step)  # once nothing is refused any more
    versions = {module.__name__: module.__version__ for module in (verl, torch, transformers)}
    python, system = platform.python_version(), platform.platform()
    run.note_environment({**versions, "python": python, "platform": system, "threads": torch.get_num_threads()})
    # Opened last: a run that is refused above adds nothing to trackers or to its metrics.
    trainer.use_logger(
        open_logger(
            run.path,
            settings.loggers,
            run_id=run.path.name,
            project=settings.project,
            config={key: value for key, value in flat(masked_settings(config.model_dump(mode="json"))) if value != {}},
            total_steps=settings.total_steps,
            resume_step=-1 if step is None and run.status == "resumed" else step,
            eval_every=None if config.data.eval is None else settings.eval_every or max(settings.total_steps, 1),
        )
    )
    return trainer, prompts


def _held_out(config: Config, checked: Checked, run: Run, rows: PromptDataset | Batch) -> HeldOut:
    settings = config.trainer

    def note(result: dict[str, Any], evaluation: Evaluation | None) -> None:
        shown = ("step", "headline", "problems", "low", "high")
        run.note_evaluation({**{name: result[name] for name in shown if name in result}, **result["metrics"]})
        if evaluation is not None and isinstance(rows, PromptDataset):
            samples, texts = evaluation.samples.slice(0, settings.log_completions), rows.texts()
            prompts = [texts[int(group.rpartition(".")[2])] for group in samples["group"]]
            samples = samples.drop(["prompt"]).add({"prompt": prompts})
            path = run.completions / f"step-{result['step']:06d}.parquet"
            save_table(path, samples.select(_COMPLETION_COLUMNS).table)

    return HeldOut(
        rows,
        settings.eval_every,
        {"accuracy": accuracy, **checked.metrics},
        **{name: getattr(settings, f"eval_{name}") for name in ("n", "temperature", "top_p", "top_k", "before")},
        kl=KL in settings.eval_metrics,
        name=f"data.eval ({config.data.eval})",
        on_result=note,
    )


def _summary(config: Config, trainer: Trainer, run: Run) -> dict[str, Any]:
    """Totals over the whole run, earlier attempts included."""
    rows = read_rows(run.metrics)

    def total(name: str) -> float:
        return math.fsum(row.get(name) or 0.0 for row in rows)

    summary: dict[str, Any] = {
        "seconds": total("time/step") + total("time/evaluation"),
        "train_tokens_per_second": total("train/tokens") / max(total("time/update"), 1e-9),
        "peak_memory_bytes": trainer.actor.group.call(ActorWorker.peak_memory),
        "control": config.trainer.control,
    }
    if seconds := total("time/rollout"):
        summary["rollout_tokens_per_second"] = total("rollout/tokens") / seconds
    return summary | ({} if trainer.held_out is None else trainer.held_out.summary(config.trainer.seed))


class _LiveReport:
    """Writes the report from time to time, after a step, and at the end.

    Attributes:
        seconds: that it took, in all.
        is_last: it has been written for the ended run.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.written = run, time.monotonic()
        self.seconds, self.is_last = 0.0, False

    def __call__(self, step: int, record: Mapping[str, Any]) -> None:
        if time.monotonic() - self.written >= REFRESH_SECONDS:
            self.write(live=True)

    def write(self, live: bool = False) -> Path | None:
        """As far as the run has come; a failed run's report is the one that is wanted most."""
        began, self.is_last = time.monotonic(), not live
        try:
            return write_report(self.run.path, live=live)
        except (VerlError, OSError) as error:
            logger.warning("no report was written: %s", error)
            return None
        finally:
            self.written = time.monotonic()
            self.seconds += self.written - began


def _seconds(times: tuple[float, float, float], rows: list[dict[str, Any]], report: float) -> dict[str, float]:
    """Seconds of each part of an attempt, from its log. Overlapping work (asynchronous rollouts) counts in full.

    Args:
        times: when the command began, when all was loaded, and when kernels were compiled.
        rows: of the attempt's log.
    """
    began, loaded, compiled = times
    parts = {"start": loaded - began, "compiling": compiled - loaded}
    for name, key in (("evaluations", "evaluation"), ("rollout", "rollout"), ("update", "update")):
        parts[name] = math.fsum(row.get(f"time/{key}") or 0.0 for row in rows)
    parts["report"] = report
    return {**parts, "the rest": max(time.monotonic() - began - sum(parts.values()), 0.0)}


def _print_table(
    summary: Mapping[str, Any], run: Path, page: Path | None, parts: Mapping[str, float] | None = None
) -> None:
    table = Table(title="result", show_header=False)
    if "headline" in summary:
        name = summary["headline"]
        _, places = scale(name, summary.get("gain_low"), summary.get("gain_high"))
        form = f"{{:.{places}{'%' if name in SHARES else 'f'}}}"
        for when in ("before", "after"):
            value = summary[f"{name}_{when}"]
            table.add_row(f"{name} {when}", "-" if value is None else form.format(value))
        if summary.get("gain") is not None:
            gain = value_text(name, summary["gain"], summary["gain_low"], summary["gain_high"], "+")
            table.add_row("gain", gain.replace(" (", "  (95 % interval "))
        elif "gain" in summary:
            table.add_row("gain", "-")
        unscored = f" ({summary['eval_unscored']} more have no such score)" if summary.get("eval_unscored") else ""
        table.add_row("held-out problems", f"{summary['eval_problems']}{unscored}")
    if "rollout_tokens_per_second" in summary:
        table.add_row("generated", f"{summary['rollout_tokens_per_second']:,.0f} tokens/s")
    table.add_row("trained", f"{summary['train_tokens_per_second']:,.0f} tokens/s")
    table.add_row("peak memory", f"{summary['peak_memory_bytes'] / 1e9:.2f} GB")
    table.add_row("time", f"{summary['seconds'] / 60:.1f} minutes")
    for name, seconds in (parts or {}).items():
        if seconds >= 0.05:
            table.add_row(f"  {name}", f"{seconds:.1f} s")
    if summary["control"]:
        table.add_row("control", str(summary["control"]))
    console = Console(soft_wrap=True)
    console.print(table)
    # Paths are outside of the table, which would cut them: they are there to be copied.
    if page is not None:
        console.print(f"report: {page}", markup=False, highlight=False)
    console.print(f"the trained model: verl export {shlex.quote(str(run))} OUT", markup=False, highlight=False)


def inputs_of(config: Config) -> tuple[dict[str, str], tuple[str, ...]]:
    """The user's code that is imported so far, and the files that the settings name or that commands of agents run.

    Returns:
        SHA-256 of files by path; and the folders of which every file counts, one that is added, too.

    Raises:
        ConfigError: one of `reward.files` is not there.
    """
    files, models = user_files(), dict(_models(config))
    rollout = config.actor_rollout_ref.rollout
    episode = None if rollout.episode is None else load_function(rollout.episode)
    for path in map(Path, (*config.reward.files, *getattr(episode, "files", ()))):
        if not path.is_file():
            raise ConfigError(f"reward.files: there is no file '{path}' (working directory {Path.cwd()})")
        files[shown_path(path.resolve())] = digest(path)
    for name, is_scored in models.items():
        folder = _folder(name)
        endings = (*_SMALL, *(_WEIGHTS if is_scored else ()))
        for file in sorted(folder.iterdir()) if folder is not None else ():
            if file.suffix in endings and file.is_file():
                files[f"{name}/{file.name}"] = digest(file)
    return files, tuple(models)


def _models(config: Config) -> Iterator[tuple[str, bool]]:
    """Models and tokenizers by directory or hub name, and whether their weights are hashed: policies,
    critics and references have theirs in checkpoints, or are compared with these."""
    policy, critic = config.actor_rollout_ref, config.critic
    for name in (policy.model.path, policy.model.tokenizer, policy.ref.path, critic.model.path, critic.model.tokenizer):
        if name is not None:
            yield name, False
    for _, part in reward_models(config):
        yield str(part.model), True
    for task in config.tasks:
        if isinstance(task.reward_model, str) and Path(task.reward_model).is_dir():
            yield task.reward_model, True


def _folder(name: str) -> Path | None:
    """The directory of a model's files: its own, or a hub model's in the cache."""
    if os.path.isdir(path := os.path.expanduser(name)):
        return Path(path)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # it is no name of a hub
        return None
    return Path(cached).parent if isinstance(cached, str) else None
