"""`verl report RUN RUN ...`: several runs on one page, without a script and without external parts.

Runs whose settings differ in nothing but the seed are one line: their mean, in a band from the lowest to the highest of
them. A run without settings, as scripts make them, is a line of its own; one that is named twice (`runs/*` has
`latest`, too) counts once. Metrics that all runs have as one constant value are left out. Runs are named by the
settings that differ.
"""

from __future__ import annotations

import html
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.config.load import read_settings
from verl.durable import write_atomic
from verl.errors import ConfigError, DataError
from verl.report.page import ASSETS, FIRST, MAX_POINTS, curves_of
from verl.schemas import SETTINGS, check_run_schema

Points = list[list[float]]
_COLORS = ("#2f6fdb", "#d9622b", "#2a9d62", "#9b51c7", "#c23b5a", "#7a7a2c", "#1f9aa8", "#8a5a3c")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 560, 220, 52, 22, 10
#: Settings that say where a run is and how it is watched, and those that `seeds` of one setting differ in.
_NOT_SETTINGS = (
    SETTINGS.key, "trainer.output_dir", "trainer.run_name", "trainer.project", "trainer.loggers", "trainer.threads",
)  # fmt: skip
_SEED = "trainer.seed"


@dataclass
class Group:
    """Runs that differ in the seed alone.

    Attributes:
        settings: flat, without the seed.
        curves: those of each run, by metric.
    """

    settings: dict[str, Any]
    names: list[str] = field(default_factory=list)
    curves: list[Mapping[str, Points]] = field(default_factory=list)


def write_comparison(runs: Sequence[Path], page: Path) -> Path:
    """Write the page; returns its path.

    Raises:
        DataError: one of the directories holds no metrics of a run.
        ConfigError: another version of verl has written one, in a form that is not read.
    """
    groups = grouped(runs)
    write_atomic(page, _render(groups).encode(errors="replace").decode())
    return page


def grouped(runs: Sequence[Path]) -> list[Group]:
    """The runs by their settings, in the order of the first of each."""
    groups: list[Group] = []
    for run in {run.resolve(): run for run in runs}.values():
        check_run_schema(run)
        curves = curves_of(run)
        if not curves:
            raise DataError(f"{run} has no metrics of a run: name run directories, such as runs/latest")
        settings = _settings(run / "config.yaml")
        settings.pop(_SEED, None)
        group = next((one for one in groups if settings and one.settings == settings), None)
        if group is None:
            groups.append(group := Group(settings))
        group.names.append(run.resolve().name)
        group.curves.append(curves)
    return groups


def differing(groups: Sequence[Group]) -> list[str]:
    """The settings in which the groups that have any differ."""
    keys = dict.fromkeys(key for group in groups for key in group.settings)
    return [key for key in keys if len({_shown(group.settings.get(key)) for group in groups if group.settings}) > 1]


def metrics_of(groups: Sequence[Group]) -> list[str]:
    """Metrics that some run has, those that people look at first; without those that never change."""
    values: dict[str, set[float]] = {}
    for curves in (curves for group in groups for curves in group.curves):
        for name, points in curves.items():
            values.setdefault(name, set()).update(value for _, value in points)
    moving = [name for name, distinct in values.items() if len(distinct) > 1]
    return sorted(moving, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))


def spread(runs: Sequence[Points]) -> list[tuple[float, float, float, float]]:
    """Step, mean, lowest and highest value of the runs that have the step; of more than `MAX_POINTS` steps, of
    stretches of them, by their last step. Only before they are thinned, runs of unequal length have the same steps."""
    by_step: dict[float, list[float]] = {}
    for points in runs:
        for step, value in points:
            by_step.setdefault(step, []).append(value)
    steps = [
        (step, statistics.fmean(by_step[step]), min(by_step[step]), max(by_step[step])) for step in sorted(by_step)
    ]
    stride = math.ceil(len(steps) / MAX_POINTS) or 1
    stretches = (steps[start : start + stride] for start in range(0, len(steps), stride))
    return [
        (part[-1][0], statistics.fmean(p[1] for p in part), min(p[2] for p in part), max(p[3] for p in part))
        for part in stretches
    ]


def _settings(file: Path) -> dict[str, Any]:
    try:
        content = read_settings(file)
    except ConfigError:
        return {}
    return {key: value for key, value in flat(content) if key not in _NOT_SETTINGS}


def flat(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The values in nested mappings, by dotted keys."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, (*path, str(key)))
    else:
        yield ".".join(path), value


def _shown(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _labels(groups: Sequence[Group], keys: Sequence[str]) -> list[str]:
    """What is special about each group; the run's name where nothing is."""
    labels = []
    for group in groups:
        differences = (f"{key.rpartition('.')[2]}={group.settings.get(key)}" for key in keys[:3])
        settings = ", ".join(differences) if group.settings else ""
        seeds = f" ({len(group.names)} runs)" if len(group.names) > 1 else ""
        labels.append((settings or group.names[0]) + seeds)
    return labels


def _render(groups: Sequence[Group]) -> str:
    keys = differing(groups)
    labels = _labels(groups, keys)
    style = (ASSETS / "report.css").read_text(encoding="utf-8")
    legend = "".join(
        f"<p><b style='color:{_color(i)}'>&#9632;</b> {html.escape(label)} "
        f"<small>{html.escape(', '.join(group.names))}</small></p>"
        for i, (label, group) in enumerate(zip(labels, groups, strict=True))
    )
    charts = "".join(_chart(name, groups) for name in metrics_of(groups))
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{len(groups)} settings</title><style>{style}</style></head><body><main>"
        f"<h1>{sum(len(group.names) for group in groups)} runs</h1><section class=panel>{legend}</section>"
        f"<section><h2>Settings that differ</h2>{_table(groups, labels, keys)}</section>"
        "<section><h2>Curves</h2><p class=none>A line is the mean of a setting's runs, its band their lowest and "
        f"highest.</p><div class='group span-3'><div class=grid>{charts}</div></div></section></main></body></html>"
    )


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]


def _table(groups: Sequence[Group], labels: Sequence[str], keys: Sequence[str]) -> str:
    if not keys:
        return "<p class=none>None.</p>"
    head = "".join(f"<th>{html.escape(label)}</th>" for label in labels)
    rows = "".join(
        f"<tr><th>{html.escape(key)}</th>"
        + "".join(f"<td>{html.escape(str(group.settings.get(key)))}</td>" for group in groups)
        + "</tr>"
        for key in keys
    )
    return f"<table><tr><th></th>{head}</tr>{rows}</table>"


def _chart(name: str, groups: Sequence[Group]) -> str:
    lines = [(i, spread([curves[name] for curves in group.curves if name in curves])) for i, group in enumerate(groups)]
    lines = [(i, line) for i, line in lines if line]
    points = [point for _, line in lines for point in line]
    left, right = min(p[0] for p in points), max(p[0] for p in points)
    low, high = min(p[2] for p in points), max(p[3] for p in points)
    across, up = (right - left) or 1.0, (high - low) or 1.0

    def xy(step: float, value: float) -> str:
        x = _LEFT + (step - left) / across * (_WIDTH - _LEFT - 10)
        y = _TOP + (high - value) / up * (_HEIGHT - _TOP - _BOTTOM)
        return f"{x:.1f} {y:.1f}"

    drawn = [
        f"<text x={_LEFT - 6} y={xy(left, value).split()[1]} text-anchor=end>{value:.4g}</text>"
        for value in (low, high)
    ]
    drawn += [
        f"<text x={xy(step, low).split()[0]} y={_HEIGHT - 4} text-anchor={anchor}>{step:g}</text>"
        for step, anchor in ((left, "start"), (right, "end"))
    ]
    for i, line in lines:
        if any(lowest < highest for _, _, lowest, highest in line):
            edge = [xy(step, highest) for step, _, _, highest in line]
            edge += [xy(step, lowest) for step, _, lowest, _ in reversed(line)]
            drawn.append(f"<path d='M{' L'.join(edge)}Z' fill='{_color(i)}' opacity=.15 />")
        path = " L".join(xy(step, mean) for step, mean, _, _ in line)
        shape = f"<path d='M{path}' fill=none stroke='{_color(i)}' stroke-width=2 />"
        x, y = path.split()[:2]
        drawn.append(shape if len(line) > 1 else f"<circle cx={x} cy={y} r=4 fill='{_color(i)}' />")
    last = ", ".join(f"<b style='color:{_color(i)}'>{line[-1][1]:.4g}</b>" for i, line in lines)
    label = html.escape(name)
    return (
        f"<div class='panel chart'><header><span>{label}</span><span>{last}</span></header>"
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img aria-label=\"{label}\">{''.join(drawn)}</svg></div>"
    )
