"""Trackers that come as packages of their own: W&B, Trackio and MLflow, as log sinks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.extras import load_extra
from verl.report.completions import without_tokens
from verl.report.record import Record, numbers_of, plain

if TYPE_CHECKING:
    import pyarrow as pa

    from verl.report.sinks import Sink


def open_tracker(name: str, project: str, run_id: str, directory: str | Path, config: Mapping[str, Any]) -> Sink:
    """The sink of a tracker; `config` are flat settings."""
    if name == "mlflow":
        return MlflowSink(project, run_id, config)
    # A resumed run goes on in the run of its id; W&B goes by `id`, Trackio by `name`. Trackio is not embedded: in a
    # notebook that would start its server within this process.
    special = {"id": run_id, "dir": str(directory)} if name == "wandb" else {"embed": False}
    run = load_tracker(name).init(project=project, name=run_id, config=dict(config), resume="allow", **special)
    return RunSink(name, run)


def load_tracker(name: str) -> Any:
    """Raises ConfigError if its package is not installed."""
    return load_extra(name, name, "trainer.loggers")


class RunSink:
    """Weights & Biases or Trackio (a local database that `trackio show` shows): `run` takes what is logged."""

    def __init__(self, name: str, run: Any) -> None:
        self.name, self._run = name, run

    def write(self, step: int, record: Record) -> None:
        self._run.log({name: plain(value) for name, value in record.items()}, step=step)

    def completions(self, step: int, table: pa.Table) -> None:
        shown = without_tokens(table)
        rows = [list(row.values()) for row in shown.to_pylist()]
        self._run.log({"completions": load_tracker(self.name).Table(columns=shown.column_names, data=rows)}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """MLflow, at `MLFLOW_TRACKING_URI`; each attempt is an MLflow run of its own, tagged with the run id."""

    name = "mlflow"

    def __init__(self, project: str, run_id: str, config: Mapping[str, Any]) -> None:
        mlflow = load_tracker("mlflow")
        self._client = mlflow.MlflowClient()
        experiment = mlflow.set_experiment(project)
        tags = {"verl.run_id": run_id, "mlflow.runName": run_id}
        self._id = self._client.create_run(experiment.experiment_id, tags=tags).info.run_id
        for name, value in config.items():
            self._client.log_param(self._id, name, value)

    def write(self, step: int, record: Record) -> None:
        for name, value in numbers_of(record).items():
            self._client.log_metric(self._id, name, value, step=step)

    def completions(self, step: int, table: pa.Table) -> None:
        rows = without_tokens(table).to_pydict()
        self._client.log_table(self._id, data=rows, artifact_file=f"completions/train-{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)
