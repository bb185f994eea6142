"""What a study came to: `best.yaml`, which `verl train` takes as it is, and `report.html` of its runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from verl.config import to_yaml
from verl.durable import write_atomic
from verl.report.compare import short_names, write_comparison
from verl.report.page import curves_of
from verl.tune.study import Search, best_of, ended

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

#: What became of a trial, by Optuna's name, the best first.
STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}


def write_results(search: Search, study: Study) -> tuple[Path | None, Path | None]:
    """Write `best.yaml`, once a trial has finished, and `report.html` (`verl report` of all runs), once a run has
    recorded something, into the study's directory; returns both."""
    settings = page = None
    if (best := best_of(study)) is not None:
        settings = search.out / "best.yaml"
        origin = f"# {best.user_attrs['run']}: {search.metric} {shown(best)}\n"
        write_atomic(settings, origin + to_yaml(search.settings({k: str(v) for k, v in best.params.items()})))
    names = [str(trial.user_attrs.get("run", "")) for trial in ended(study)]  # those named twice count once
    if runs := [run for name in names if curves_of(run := search.out / "runs" / name)]:
        page = write_comparison(runs, search.out / "report.html")
    return settings, page


def rows(search: Search, study: Study) -> list[tuple[str, ...]]:
    """A line a trial, the best first: number, searched values, value of the metric, what became of it."""
    sign = -1 if search.direction == "maximize" else 1
    ranks = [*STATES]
    trials = [trial for trial in ended(study) if "as" not in trial.user_attrs]
    ordered = sorted(trials, key=lambda t: (ranks.index(t.state.name), sign * (t.value or 0.0), t.number))
    return [(str(t.number), *map(short, t.params.values()), shown(t), STATES[t.state.name]) for t in ordered]


def columns(search: Search) -> list[str]:
    """The headers of `rows`: keys are called as on the page of the runs."""
    return ["trial", *short_names([*search.space]).values(), search.metric, ""]


def shown(trial: FrozenTrial) -> str:
    return "-" if trial.value is None else f"{trial.value:.6g}"


def short(value: object) -> str:
    """A fraction with few digits, anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
