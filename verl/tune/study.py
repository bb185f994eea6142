"""A study: trials one after the other, noted in a journal, so that the same command goes on where it was cut off. Its
results are `best.yaml`, which `verl train` takes as it is, and `report.html` of its runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from verl._base.durable import append_lines, lock_file, write_atomic
from verl._base.extras import load_extra
from verl.config import Config, load_config, run_id, to_yaml
from verl.errors import ConfigError, VerlError
from verl.report.compare import short_names, write_comparison
from verl.report.reading import curves_in, is_number, read_rows
from verl.run.build import check_settings
from verl.run.folder import is_finished
from verl.tune.space import combinations, ends
from verl.tune.trial import TrialFailedError, UnknownMetricError, run_trial, value_of

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

#: Share of a run's steps in which no trial is pruned: the first steps say little.
WARM_UP = 0.3
#: What became of a trial, by Optuna's name, the best first.
STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}


@dataclass(frozen=True)
class Search:
    """The options of `verl tune`.

    last: how many of a run's last records of the metric its value is the mean of.
    """

    file: Path
    overrides: tuple[str, ...]
    space: dict[str, BaseDistribution]
    metric: str
    direction: Literal["maximize", "minimize"]
    trials: int
    seed: int
    out: Path
    prune: bool = False
    last: int = 1

    def settings(self, values: dict[str, str]) -> Config:
        """The settings of the file with searched values, as overrides have them; a key without one has its first."""
        first = {key: ends(distribution)[0] for key, distribution in self.space.items()}
        return load_config(self.file, [*self.overrides, *(f"{key}={value}" for key, value in (first | values).items())])

    def command(self, name: str, values: dict[str, str]) -> tuple[list[str], Path]:
        """The arguments of a trial's `verl train`, and the directory of its run."""
        everything = {**values, "trainer.output_dir": str(self.out / "runs"), "trainer.run_name": name}
        run = self.out / "runs" / run_id(self.settings(everything))
        return [str(self.file), *self.overrides, *(f"{key}={value}" for key, value in everything.items())], run

    def check(self) -> None:
        """Each end of each range, and each value, with the first values of the others.

        Raises:
            ConfigError: a key is unknown, or a run would refuse a value.
        """
        for key, distribution in self.space.items():
            for end in ends(distribution):
                try:
                    check_settings(self.settings({key: end}))
                except VerlError as error:
                    raise ConfigError(f"--search {key}: {end} is refused: {error}") from error

    def identity(self) -> dict[str, Any]:
        """The options that may not change when a study goes on."""
        return {
            "search": {key: repr(distribution) for key, distribution in self.space.items()},
            "metric": f"{self.metric} ({self.direction}, mean of the last {self.last})",
            "seed": self.seed,
            # Without the first line, the version of the form: it is no setting, and studies of before have none.
            "settings": to_yaml(self.settings({})).partition("\n")[2],
        }


def tune(search: Search) -> Iterator[Study]:
    """Run what is missing of a study; yields it at first and whenever one more trial has ended.

    A trial's attribute `run` is the name of its run, `reason` why it failed, `as` the number of the trial that had its
    values before, whose value it has without a run.

    Raises:
        ConfigError: the directory holds another study, or another process works on it; Optuna is not installed.
        VerlError: the first run that finished does not record the metric.
    """
    out = search.out
    try:
        (out / "runs").mkdir(parents=True, exist_ok=True)
        lock = lock_file(out / ".lock")
    except OSError as error:
        raise ConfigError(f"{out} cannot be used: {error.strerror or error}; choose another --out") from None
    if lock is None:
        raise ConfigError(f"another process works on the study {out}: wait for it or stop it")
    with lock:
        study = _open(search)
        yield study
        while (trial := _next(study, search)) is not None:
            _run(study, trial, search)
            yield study


def ended(study: Study) -> list[FrozenTrial]:
    """The trials that have ended, by number."""
    return [trial for trial in study.trials if trial.state.is_finished()]


def _open(search: Search) -> Study:
    """The study of a directory, which is created if needed."""
    optuna = load_extra("optuna", "tune", "verl tune")
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    journal = search.out / "study.jsonl"
    try:
        append_lines(journal, "")  # a torn last line goes, and so does the library's lock of a process that was killed
        journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
        storage = JournalStorage(JournalFileBackend(str(journal)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{journal} cannot be used: {error}; choose another --out") from None
    steps = search.settings({}).trainer.total_steps
    study: Study = optuna.create_study(
        study_name="verl",
        storage=storage,
        direction=search.direction,
        pruner=optuna.pruners.MedianPruner(n_warmup_steps=round(WARM_UP * steps)),
        load_if_exists=True,
    )
    asked = search.identity()
    began = study.user_attrs.get("identity", asked)
    if other := [name for name in asked if asked[name] != began.get(name)]:
        raise ConfigError(f"{search.out} holds a study of another {' and '.join(other)}: choose another --out")
    study.set_user_attr("identity", asked)
    for trial in study.get_trials(states=[TrialState.RUNNING]):  # cut off: it is asked for again, with its values
        storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
    for values in combinations(search.space, search.trials):
        study.enqueue_trial(values, skip_if_exists=True)
    return study


def _next(study: Study, search: Search) -> Trial | None:
    """The trial that was cut off, else a new one, with its values; None once there are enough."""
    from optuna.samplers import TPESampler
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False)
    waiting = [trial.number for trial in trials if trial.state == TrialState.WAITING]
    if not waiting and len(trials) >= (len(combinations(search.space, search.trials)) or search.trials):
        return None
    # A seed for each trial: a study that goes on proposes what it would have proposed without the interruption.
    seed = np.random.SeedSequence([search.seed, min(waiting, default=len(trials))])
    study.sampler = TPESampler(seed=int(seed.generate_state(1)[0]))
    return study.ask(search.space)


def _run(study: Study, trial: Trial, search: Search) -> None:
    """Run a trial, or on with one that was cut off, and note what became of it."""
    from optuna.trial import TrialState

    finished = [other for other in ended(study) if other.state.name == "COMPLETE"]
    same = next((other for other in finished if "run" in other.user_attrs and other.params == trial.params), None)
    if same is not None:  # this one would train the same again: it has the same seed
        trial.set_user_attr("run", same.user_attrs["run"])
        trial.set_user_attr("as", same.number)
        study.tell(trial, same.value)
        return
    name, values = f"trial-{trial.number:03d}", {key: str(value) for key, value in trial.params.items()}
    try:
        command, run = search.command(name, values)
        trial.set_user_attr("run", run.name)
        is_hopeless = partial(_is_hopeless, study, trial, run, search)
        steps = search.settings(values).trainer.total_steps
        if is_finished(run, steps) or run_trial(command, search.out / f"{name}.log", is_hopeless):
            study.tell(trial, value_of(run, search.metric, search.last))
        else:
            study.tell(trial, state=TrialState.PRUNED)
    except (TrialFailedError, ConfigError) as error:
        trial.set_user_attr("reason", str(error))
        study.tell(trial, state=TrialState.FAIL)
        if isinstance(error, UnknownMetricError) and not finished:
            raise VerlError(f"trial {trial.number}: {error}; begin again with another --out") from None


def _is_hopeless(study: Study, trial: Trial, run: Path, search: Search) -> bool:
    """Report to Optuna what a run has recorded since the last call; whether the run is to be stopped."""
    known = study.get_trials(deepcopy=False)[trial.number].intermediate_values
    for row in read_rows(run / "metrics.jsonl") if search.prune else ():
        if is_number(value := row.get(search.metric)) and row["step"] not in known:
            trial.report(value, row["step"])
            if trial.should_prune():
                return True
    return False


def write_results(search: Search, study: Study) -> tuple[Path | None, Path | None]:
    """Write `best.yaml`, once a trial has finished, and `report.html` (`verl report` of all runs), once a run has
    recorded something, into the study's directory; returns both."""
    settings = page = None
    if any(trial.state.name == "COMPLETE" for trial in ended(study)):
        settings, best = search.out / "best.yaml", study.best_trial  # the earliest of equals
        origin = f"# {best.user_attrs['run']}: {search.metric} {shown(best)}\n"
        write_atomic(settings, origin + to_yaml(search.settings({k: str(v) for k, v in best.params.items()})))
    # Those named twice count once.
    folders = [search.out / "runs" / str(trial.user_attrs.get("run", "")) for trial in ended(study)]
    files = [(run, read_rows(run / "metrics.jsonl"), read_rows(run / "eval.jsonl")) for run in folders]
    if runs := [run for run, metrics, evals in files if curves_in(metrics, evals)]:
        page = write_comparison(runs, search.out / "report.html")
    return settings, page


def rows(search: Search, study: Study) -> list[tuple[str, ...]]:
    """A table: its headers (keys as on the page of the runs), then a line a trial, the best first: number, searched
    values, value of the metric, outcome."""
    headers = ("trial", *short_names([*search.space]).values(), search.metric, "")
    sign = -1 if search.direction == "maximize" else 1
    ranks = [*STATES]
    trials = [trial for trial in ended(study) if "as" not in trial.user_attrs]
    ordered = sorted(trials, key=lambda t: (ranks.index(t.state.name), sign * (t.value or 0.0), t.number))
    return [
        headers,
        *((str(t.number), *map(short, t.params.values()), shown(t), STATES[t.state.name]) for t in ordered),
    ]


def shown(trial: FrozenTrial) -> str:
    return "-" if trial.value is None else f"{trial.value:.6g}"


def short(value: object) -> str:
    """A fraction with few digits, anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
