"""Logging: the record of a step goes to every sink: files, the console, TensorBoard, trackers."""

from __future__ import annotations

import io
import itertools
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from verl._base.checked import checked
from verl._base.durable import LineFile, RecordFile, append_lines
from verl._base.extras import load_extra
from verl._base.names import check_known
from verl._base.record import Count, Natural
from verl._base.schemas import RUN_FILE, write_run_schema
from verl._host.user_calls import DEADLINE, UserCode
from verl._host.user_code import describe, show_once, traceback_of
from verl.errors import ConfigError
from verl.report.completions import save_table, without_tokens

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

#: Of a step, as it is logged: names such as "reward/mean", and numbers, booleans or text.
Record = Mapping[str, Any]
Hook = Callable[[int, dict[str, Any]], None]
EXTRAS = ("wandb", "trackio", "mlflow")
SINKS = ("console", "tensorboard", *EXTRAS)
_METRICS = "metrics.jsonl"
#: What is logged in a directory, and the version of its form.
_FILES = (_METRICS, "completions", "tensorboard", RUN_FILE)
#: Of the trainers of this process: two that are made in one second have a directory each.
_numbers_of_runs = itertools.count()


class Logger:
    """Sends records to sinks and hooks. One that raises is left out from then on, with a warning: logging never stops
    training.

    Args:
        sinks: each has a `name`, and takes what it has methods for: the record of a step with `write(step, record)`;
            what the run does between steps, where a person looks on, with `phase(text)`; its samples with
            `completions(step, table)`; its end with `close()`.
    """

    def __init__(self, sinks: Iterable[Any] = ()) -> None:
        self.sinks = list(sinks)

    @checked
    def on_log_hook(self, fn: Hook, seconds: float = DEADLINE) -> None:
        """`fn(step, record)` gets a copy of every record from now on, in a thread, with `seconds` as its deadline."""
        code = UserCode(f"hook {getattr(fn, '__qualname__', type(fn).__name__)}")
        write = lambda step, record: code.run(seconds, fn, step, dict(record))  # noqa: E731
        self.sinks.append(SimpleNamespace(name=code.what, write=write))

    def log(self, step: int, record: Record) -> None:
        self._call("write", step, record)

    def phase(self, text: str) -> None:
        """Show what the run does between steps, on sinks that have `phase`."""
        self._call("phase", text)

    def completions(self, step: int, make: Callable[[], pa.Table]) -> None:
        """Send the samples of a step (see `verl.report.completions`), which are only made where a sink takes them."""
        if any(hasattr(sink, "completions") for sink in self.sinks):
            self._call("completions", step, make())

    def close(self) -> None:
        self._call("close")
        self.sinks.clear()

    def _call(self, method: str, *args: Any) -> None:
        """Call a method of every sink that has it."""
        for sink in [sink for sink in self.sinks if hasattr(sink, method)]:
            try:
                getattr(sink, method)(*args)
            except Exception as error:  # of whatever library or user function the sink is made
                self.sinks.remove(sink)
                logger.warning("log sink '%s' failed and is off from now on: %s", sink.name, describe(error))
                show_once(logger, f"log sink '{sink.name}'", traceback_of(error))


class JsonlSink:
    """Appends one JSON object a line: `step` and the record. Numbers that are not finite become null. A line is in the
    file when `write` returns; if the disk refuses it, it waits for the next one."""

    name = _METRICS

    def __init__(self, path: str | Path) -> None:
        self._lines: LineFile[str] = LineFile(Path(path))
        self._lines.path.parent.mkdir(parents=True, exist_ok=True)
        append_lines(self._lines.path, "")
        self.close = self._lines.append

    def write(self, step: int, record: Record) -> None:
        row = {"step": step, **{name: plain(value) for name, value in record.items()}}
        self._lines.append(json.dumps(row, allow_nan=False) + "\n")


class TensorBoardSink:
    """Scalars as TensorBoard events.

    Args:
        resume_step: the last committed step when a run is resumed (-1: none was); what TensorBoard saw after it is
            purged.
    """

    name = "tensorboard"

    def __init__(self, directory: str | Path, resume_step: int | None = None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2, summary_pb2.Summary
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names: one of the same second as another, or of a clock that was
        # set back, would come before it.
        seconds = (path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*"))
        second = max([int(time.time()), *(int(second) + 1 for second in seconds if second.isdigit())])
        self._records = RecordFile(folder / f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}.0")
        self.close = self._records.append
        self._add(file_version="brain.Event:2")
        if resume_step is not None:
            self._add(file_version="brain.Event:2", step=resume_step + 1)
            self._add(session_log=self._event.SessionLog(status=self._event.SessionLog.START), step=resume_step + 1)

    def write(self, step: int, record: Record) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers_of(record).items()]
        self._add(step=step, summary=self._summary(value=values))

    def _add(self, **event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        framed = io.BytesIO()
        RecordWriter(framed).write(self._event.Event(wall_time=time.time(), **event).SerializeToString())
        self._records.append(framed.getvalue())

    def completions(self, step: int, table: pa.Table) -> None:
        """Histograms of rewards and lengths, and some samples as text."""
        from torch.utils.tensorboard import summary

        for tag, name in {"reward/histogram": "reward", "response/length_histogram": "length"}.items():
            if len(values := table.column(name).drop_null()):
                self._add(step=step, summary=summary.histogram(tag, values.to_numpy(), bins=30))
        samples = map(_markdown, without_tokens(table).to_pylist())
        self._add(step=step, summary=summary.text("completions", "\n\n---\n\n".join(samples)))


def _markdown(row: Mapping[str, Any]) -> str:
    """A sample for TensorBoard, whose texts are Markdown: what is indented is shown as it is."""
    numbers = [f"{name} {value:.4g}" for name, value in row.items() if isinstance(value, float)]
    head = ", ".join([*numbers, f"length {row['length']}", f"finish {row['finish']}"])
    lines = [f"[{name}]\n{row[name]}" for name in ("prompt", "response", "ground_truth") if row[name] is not None]
    return head + "\n\n" + "\n".join(f"    {line}" for line in "\n".join(lines).splitlines())


class RunSink:
    """Weights & Biases or Trackio (a local database that `trackio show` shows), by the `name` of its package.

    A resumed run goes on in the run of its id; W&B goes by `id`, Trackio by `name`.
    """

    def __init__(self, name: str, project: str, run_id: str, directory: str, config: Mapping[str, Any]) -> None:
        self.name, self._library = name, load_extra(name, name, "trainer.loggers")
        # Trackio is not embedded: in a notebook that would start its server within this process.
        special = {"id": run_id, "dir": directory} if name == "wandb" else {"embed": False}
        self._run = self._library.init(project=project, name=run_id, config=dict(config), resume="allow", **special)
        self.close: Callable[[], None] = self._run.finish

    def write(self, step: int, record: Record) -> None:
        self._run.log({name: plain(value) for name, value in record.items()}, step=step)

    def completions(self, step: int, table: pa.Table) -> None:
        shown = without_tokens(table)
        rows = [list(row.values()) for row in shown.to_pylist()]
        self._run.log({"completions": self._library.Table(columns=shown.column_names, data=rows)}, step=step)


class MlflowSink:
    """MLflow, at `MLFLOW_TRACKING_URI`; each attempt is an MLflow run of its own, tagged with the run id."""

    name = "mlflow"

    def __init__(self, project: str, run_id: str, config: Mapping[str, Any]) -> None:
        mlflow = load_extra("mlflow", "mlflow", "trainer.loggers")
        self._client = mlflow.MlflowClient()
        tags = {"verl.run_id": run_id, "mlflow.runName": run_id}
        self._id = self._client.create_run(mlflow.set_experiment(project).experiment_id, tags=tags).info.run_id
        for name, value in config.items():
            self._client.log_param(self._id, name, value)
        self.close = partial(self._client.set_terminated, self._id)

    def write(self, step: int, record: Record) -> None:
        for name, value in numbers_of(record).items():
            self._client.log_metric(self._id, name, value, step=step)

    def completions(self, step: int, table: pa.Table) -> None:
        rows = without_tokens(table).to_pydict()
        self._client.log_table(self._id, data=rows, artifact_file=f"completions/train-{step:06d}.json")


@checked
def open_logger(
    directory: str | Path | None,
    sinks: Iterable[str] = ("console", "tensorboard"),
    *,
    run_id: str = "run",
    project: str = "verl",
    config: Mapping[str, Any] | None = None,
    total_steps: Natural | None = None,
    resume_step: Annotated[int, Field(ge=-1)] | None = None,
    eval_every: Count | None = None,
) -> Logger:
    """A logger that writes `metrics.jsonl`, `completions/` and TensorBoard events under `directory` (None: no files),
    and what else `sinks` names.

    Args:
        config: flat settings for W&B, Trackio and MLflow.
        total_steps: the length of the run.
        resume_step: the last committed step of a run that is resumed; -1: none was; None: nothing was logged before.
        eval_every: steps from one evaluation to the next, for the time left on the console; None: no evaluations.

    Raises:
        ConfigError: an unknown sink, or one whose package is not installed.
    """
    from verl.report.progress import ConsoleSink

    wanted, settings = list(sinks), config or {}
    check_loggers(wanted)
    if directory is not None:
        wanted[:0] = [_METRICS, "completions"]
    opened: list[Any] = []
    for name in wanted:
        try:
            if name == "console":
                opened.append(ConsoleSink(total_steps, start=max(resume_step or 0, 0), eval_every=eval_every))
            elif name == "mlflow":
                opened.append(MlflowSink(project, run_id, settings))
            elif name in EXTRAS:
                opened.append(RunSink(name, project, run_id, str(directory or "."), settings))
            elif directory is not None:
                opened.append(_in_files(name, Path(directory), resume_step))
        except ConfigError:
            raise
        except Exception as error:  # a tracker that cannot be reached, a disk that is full
            logger.warning("log sink '%s' cannot be opened and is off: %s: %s", name, type(error).__name__, error)
    return Logger(opened)


def _in_files(name: str, directory: Path, resume_step: int | None) -> Any:
    """A sink whose files are in the directory of the run, which says the version of its form."""
    if name == "tensorboard":
        return TensorBoardSink(directory / name, resume_step)
    if name == "completions":
        save = lambda step, table: save_table(directory / name / f"train-{step:06d}.parquet", table)  # noqa: E731
        return SimpleNamespace(name=name, completions=save)
    sink = JsonlSink(directory / name)
    write_run_schema(directory)
    return sink


def check_loggers(sinks: Iterable[str]) -> None:
    """Raises ConfigError for an unknown sink, and for one whose package is not installed."""
    for name in sinks:
        check_known("trainer.loggers: unknown logger", [name], SINKS)
        if name in EXTRAS:
            load_extra(name, name, "trainer.loggers")


def run_directory(log_dir: str | Path | bool | None, name: str) -> Path | None:
    """Where a trainer's files go: `log_dir`; None: `runs/<name>-<time>`; False: nowhere."""
    if log_dir is False:
        return None
    if log_dir is None or log_dir is True:
        return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_numbers_of_runs)}"
    return Path(log_dir)


def set_aside(directory: Path) -> None:
    """Move what another run has logged in a directory into a folder `earlier-N` there: both would draw one curve."""
    file = directory / _METRICS
    if not file.is_file() or not file.stat().st_size:
        return
    folders = (directory / f"earlier-{number}" for number in itertools.count(1))
    folder = next(path for path in folders if not path.exists())
    folder.mkdir()
    for name in _FILES:
        if (directory / name).exists():
            (directory / name).rename(folder / name)
    logger.warning("%s has the log of another run, which is in %s from now on", directory, folder)


def numbers_of(record: Record) -> dict[str, float]:
    """The numbers of a record."""
    return {name: number for name, value in record.items() if (number := _number(value)) is not None}


def _number(value: Any) -> float | None:
    try:
        return float(value) if hasattr(value, "__float__") else None
    except (TypeError, ValueError, RuntimeError):  # a tensor or array of several numbers
        return None


def plain(value: Any) -> Any:
    """A value as JSON has it; what is neither a number nor text becomes its text."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    number = _number(value)
    if number is None:
        return str(value)
    return number if math.isfinite(number) else None
