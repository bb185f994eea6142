"""`verl report RUN RUN ...`: several runs on one page, with the parts of a run's own page.

Runs whose settings differ in nothing but the seed are one line: their mean, in a band from the lowest to the highest of
them. A run without settings, as scripts make them, is a line of its own; one that is named twice (`runs/*` has
`latest`, too) counts once. Metrics that all runs have as one constant value are left out. Runs are named by the
settings that differ, and link to their own pages.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice, product
from pathlib import Path
from string import ascii_uppercase
from typing import Any
from urllib.parse import quote

from verl._base.schemas import SETTINGS, check_run_schema
from verl.config.document import flat
from verl.config.load import read_settings
from verl.errors import ConfigError, DataError
from verl.report.page import FIRST, duration, headline, meanings, value_text, write_page
from verl.report.reading import (
    MAX_POINTS,
    Points,
    clock_of,
    curves_in,
    evaluated_samples,
    is_number,
    json_of,
    read_rows,
    stretches,
)

#: Points of all curves of a page together, and answers of all runs.
_MOST_POINTS, _MOST_ANSWERS = 200_000, 4000
#: Settings that a label names.
_MOST_NAMED = 6
#: Settings that are named first, and last words of keys that say nothing alone.
_FIRST_SETTINGS = ("algorithm.name", "actor_rollout_ref.model.path", "actor_rollout_ref.actor.optim.lr")
_VAGUE = ("name", "path", "type", "kind", "enabled", "enable", "size", "n")
#: Settings that say where a run is and how it is watched, and those that `seeds` of one setting differ in.
_NOT_SETTINGS = (
    SETTINGS.key, "trainer.output_dir", "trainer.run_name", "trainer.project", "trainer.loggers", "trainer.threads",
    "trainer.seed",
)  # fmt: skip


@dataclass
class Group:
    """Runs that differ in the seed alone.

    Attributes:
        settings: flat, without the seed.
        runs: their directories.
        curves: of each run, points by metric.
        clocks: rows (step, seconds, tokens) of each run.
    """

    settings: dict[str, Any]
    runs: list[Path] = field(default_factory=list)
    curves: list[Mapping[str, Points]] = field(default_factory=list)
    clocks: list[Points] = field(default_factory=list)


def write_comparison(runs: Sequence[Path], page: Path) -> Path:
    """Write the page; returns its path.

    Raises:
        DataError: one of the directories holds no metrics of a run.
        ConfigError: another version of verl has written one, in a form that is not read.
    """
    groups = grouped(runs)
    keys, names = differing(groups), metrics_of(groups)
    settings = {
        key: [v if isinstance(v := one.settings.get(key), str) else json.dumps(v, default=str) for one in groups]
        for key in keys
    }
    columns = chain.from_iterable(product(ascii_uppercase, repeat=size) for size in count(1))  # A, ..., Z, AA, AB, ...
    letters = ["".join(column) for column in islice(columns, len(groups))]
    lines = [
        _line(group, number, letter, label, page.resolve().parent)
        for number, (group, letter, label) in enumerate(zip(groups, letters, _labels(groups, settings), strict=True))
    ]
    data = {
        "first": FIRST,
        "lines": [{"key": line["letter"], "label": line["label"], "clock": line["clock"]} for line in lines],
        "curves": _curves(groups, names),
        "meanings": meanings(names),
        "answers": _answers(groups, letters),
    }
    total = sum(len(group.runs) for group in groups)
    return write_page(page, "compare", data, title=f"{total} run{'s' * (total != 1)}", lines=lines, settings=settings)


def grouped(runs: Sequence[Path]) -> list[Group]:
    """The runs by their settings, in the order of the first of each."""
    groups: list[Group] = []
    for run in {run.resolve(): run for run in runs}.values():
        check_run_schema(run)
        metrics = read_rows(run / "metrics.jsonl")
        curves = curves_in(metrics, read_rows(run / "eval.jsonl"))
        if not curves:
            raise DataError(f"{run} has no metrics of a run: name run directories, such as runs/latest")
        try:
            content = read_settings(run / "config.yaml")[0]
        except ConfigError:
            content = {}
        settings = {key: value for key, value in flat(content) if value != {} and key not in _NOT_SETTINGS}
        group = next((one for one in groups if settings and one.settings == settings), None)
        if group is None:
            groups.append(group := Group(settings))
        group.runs.append(run.resolve())
        group.curves.append(curves)
        group.clocks.append(clock_of(metrics))
    return groups


def differing(groups: Sequence[Group]) -> list[str]:
    """The settings in which the groups that have any differ, those that are asked for first at the front."""
    known = [group.settings for group in groups if group.settings]
    keys = dict.fromkeys([*_FIRST_SETTINGS, *(key for settings in known for key in settings)])
    return [key for key in keys if len({json.dumps(one.get(key), sort_keys=True, default=str) for one in known}) > 1]


def metrics_of(groups: Sequence[Group]) -> list[str]:
    """Metrics that some run has, those that people look at first; without those that never change."""
    values: dict[str, set[float]] = {}
    for curves in (curves for group in groups for curves in group.curves):
        for name, points in curves.items():
            values.setdefault(name, set()).update(value for _, value in points)
    moving = [name for name, distinct in values.items() if len(distinct) > 1]
    return sorted(moving, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))


def spread(runs: Sequence[Points], most: int = MAX_POINTS) -> list[tuple[float, float, float, float]]:
    """Step, mean, lowest and highest value of the runs that have the step; of more than `most` steps, of
    stretches of them, by their last step. Only before they are thinned, runs of unequal length have the same steps."""
    by_step: dict[float, list[float]] = {}
    for points in runs:
        for step, value in points:
            by_step.setdefault(step, []).append(value)
    steps = [(step, statistics.fmean(values), min(values), max(values)) for step, values in sorted(by_step.items())]
    return [
        (part[-1][0], statistics.fmean(p[1] for p in part), min(p[2] for p in part), max(p[3] for p in part))
        for part in stretches(steps, most)
    ]


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The name of each key among the others: by its last word, or by as many as tell it from them and say what it
    is of; "algorithm" for `algorithm.name`."""
    names = {}
    for key in keys:
        words = key.split(".")
        endings = (words[-count:] for count in range(2 if words[-1] in _VAGUE else 1, len(words) + 1))
        alone = (end for end in endings if sum(f".{other}".endswith(f".{'.'.join(end)}") for other in keys) == 1)
        names[key] = ".".join(next(alone, words)).removesuffix(".name")
    return names


def _labels(groups: Sequence[Group], settings: Mapping[str, Sequence[str]]) -> list[str]:
    """The difference of each group: the settings that differ, of very many the first; the run's name where none
    does. The page has a table of all."""
    names, more = short_names([*settings]), len(settings) - _MOST_NAMED
    labels = []
    for number, group in enumerate(groups):
        differences = (f"{names[key]}={texts[number]}" for key, texts in islice(settings.items(), _MOST_NAMED))
        label = ", ".join(differences) + f" and {more} more" * (more > 0) if group.settings else ""
        seeds = f" ({len(group.runs)} runs)" if len(group.runs) > 1 else ""
        labels.append((label or group.runs[0].name) + seeds)
    return labels


def _curves(groups: Sequence[Group], names: Sequence[str]) -> dict[str, list[Any]]:
    """The lines of each metric: number of the group, points (step, mean, and where runs differ lowest and highest)."""
    most = max(20, min(MAX_POINTS, _MOST_POINTS // max(1, len(names) * len(groups))))
    curves: dict[str, list[Any]] = {}
    for name in names:
        for number, group in enumerate(groups):
            points = spread([curves[name] for curves in group.curves if name in curves], most)
            is_band = any(low < high for _, _, low, high in points)
            rounded = [[float(f"{value:.7g}") for value in point[: 4 if is_band else 2]] for point in points]
            if points:
                curves.setdefault(name, []).append([number, rounded])
    return curves


def _answers(groups: Sequence[Group], letters: Sequence[str]) -> dict[str, list[Any]]:
    """From each run's last evaluation: prompts, and rows (number of the prompt, how many answers to it came before,
    answer, reward)."""
    prompts: dict[str, int] = {}
    runs: list[dict[str, Any]] = []
    most = _MOST_ANSWERS // sum(len(group.runs) for group in groups)
    for letter, group in zip(letters, groups, strict=True):
        for run in group.runs:
            for sample in evaluated_samples(run / "completions")[-1:]:
                before: Counter[int] = Counter()
                rows = []
                for _, prompt, response, reward in sample["rows"][:most]:
                    number = prompts.setdefault(prompt, len(prompts))
                    rows.append([number, before[number], response, reward])
                    before[number] += 1
                runs.append({"label": f"{letter} {run.name}", "step": sample["step"], "of": sample["of"], "rows": rows})
    return {"prompts": [*prompts], "runs": runs}


def _line(group: Group, number: int, letter: str, label: str, folder: Path) -> dict[str, Any]:
    """The runs of a group as rows of the table, for a page in that folder; with the mean of several."""
    runs, gains = [], []
    for run, clock in zip(group.runs, group.clocks, strict=True):
        gain, cells = _result(run, clock[-1])
        gains += [] if gain is None else [gain]
        page = quote(Path(os.path.relpath(run / "report.html", folder)).as_posix())
        runs.append({"name": run.name, "page": page if (run / "report.html").is_file() else "", "cells": cells})
    mean = ""
    if len({name for name, _ in gains}) == 1 and len(gains) > 1:
        values = [gain for _, gain in gains]
        ends = (statistics.fmean(values), min(values), max(values))
        shown = [value_text(gains[0][0], value, sign="+") for value in ends]
        mean = f"{shown[0]} ({shown[1]} to {shown[2]} over {len(values)} runs)"
    clock = max(group.clocks, key=len)
    return {"number": number, "letter": letter, "label": label, "clock": clock, "runs": runs, "mean": mean}


def _result(run: Path, clock: Sequence[float]) -> tuple[tuple[str, float] | None, tuple[str, ...]]:
    """The gain in the headline metric, by its name, and the cells of a run from "before" on."""
    summary = json_of(run / "summary.json")
    name, scored = headline(summary, read_rows(run / "eval.jsonl"))
    shown = [value_text(name, row[name], row.get("low"), row.get("high")) for row in (*scored[:1], *scored[-1:])]
    gain, text = None, ""
    if len(scored) > 1:
        gain = known if is_number(known := summary.get("gain")) else scored[-1][name] - scored[0][name]
        text = value_text(name, gain, summary.get("gain_low"), summary.get("gain_high"), "+")
    before, after = f"{name} {shown[0]}" if shown else "–", shown[1] if len(scored) > 1 else ""
    step, seconds, tokens = clock
    cells = (before, after, text, f"{step:,.0f}", f"{tokens:,.0f}", duration(seconds))
    return None if gain is None else (name, gain), (*cells, str(summary.get("state", "not finished")))
