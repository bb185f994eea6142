"""What a study came to: `best.yaml`, which `verl train` takes as it is, and `report.html` of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from verl.config import to_yaml
from verl.durable import write_atomic
from verl.trainer.compare import write_comparison
from verl.trainer.report import curves_of
from verl.tune.study import Outcome, Search, best_of


def write_results(search: Search, ended: Mapping[int, Outcome]) -> tuple[Path | None, Path | None]:
    """Write `best.yaml`, once a trial has finished, and `report.html` (`verl report` of all runs), once a run has
    recorded something, into the study's directory; returns both."""
    settings = page = None
    if (best := best_of(ended, search)) is not None:
        settings = search.out / "best.yaml"
        origin = f"# {best.run.name}: {search.metric} {shown(best)}\n"
        write_atomic(settings, origin + to_yaml(search.settings(best.values)))
    if runs := [trial.run for _, trial in sorted(ended.items()) if curves_of(trial.run)]:
        page = write_comparison(runs, search.out / "report.html")
    return settings, page


def rows(search: Search, ended: Mapping[int, Outcome]) -> list[tuple[str, ...]]:
    """A line a trial, the best first: number, searched values, value of the metric, what became of it."""
    sign = -1 if search.direction == "maximize" else 1
    ranks = ("finished", "pruned", "failed")
    ordered = sorted(ended.values(), key=lambda t: (ranks.index(t.state), sign * (t.value or 0.0), t.number))
    return [(str(t.number), *map(short, t.values.values()), shown(t), t.reason or t.state) for t in ordered]


def columns(search: Search) -> list[str]:
    """What stands above `rows`: a key is called by its last word if no other has that."""
    words = [dimension.key.rpartition(".")[2] for dimension in search.space]
    names = [word if words.count(word) == 1 else d.key for word, d in zip(words, search.space, strict=True)]
    return ["trial", *names, search.metric, ""]


def shown(trial: Outcome) -> str:
    return "-" if trial.value is None else f"{trial.value:.6g}"


def short(value: str) -> str:
    """A number with few digits, anything else as it is."""
    try:
        return f"{float(value):.4g}" if "." in value or "e" in value else value
    except ValueError:
        return value
