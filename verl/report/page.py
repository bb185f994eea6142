"""`report.html` of a run: one file without external parts, made from the run directory.

Read are, each only if it is there:

    metrics.jsonl             one JSON object a line: step, time, and metrics named "group/name"
    eval.jsonl                likewise: step, metrics, headline (which of them matters: accuracy, from 0 to 1, if not
                              given), low and high (its 95 % interval)
    completions/step-N.parquet   id, prompt, response, reward (null: no score) of an evaluation's samples
    completions/train-N.parquet  what a training step learned from, see `completions`
    checkpoints/              its names are shown, with the command that exports one
    summary.json              headline, accuracy_before, accuracy_after (or of another headline), gain_low, gain_high,
                              eval_problems, seconds, state, control,
                              rollout_tokens_per_second, train_tokens_per_second, peak_memory_bytes
    config.yaml, environment.json, logs/*.log   shown as they are; one log an attempt

Texts of prompts and completions are untrusted; they reach the page as data, never as markup, and the page's content
policy lets no script run but its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2

from verl._base.durable import write_atomic
from verl._base.schemas import check_run_schema
from verl.config.document import flat
from verl.config.load import read_settings
from verl.errors import ConfigError, DataError
from verl.report.reading import (
    MAX_POINTS,
    Json,
    clock_of,
    curves_in,
    evaluated_samples,
    finite,
    is_number,
    json_of,
    read_rows,
    stretches,
    text_of,
    training_samples,
)

ASSETS = Path(__file__).parent / "assets"
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(ASSETS), autoescape=True, trim_blocks=True, lstrip_blocks=True
)
#: After so many seconds the page of a live run is written anew, and reloads itself.
REFRESH_SECONDS = 30
#: Metrics that people look at first.
FIRST = (
    "reward/mean",
    "eval/accuracy",
    "eval/reward",
    "eval/loss",
    "loss",
    "response/length",
    "rollout/entropy",
    "kl",
    "kl/eval",
    "policy/kl",
)
#: Headline metrics that are shares, shown in per cent.
SHARES = ("accuracy", "pairs/accuracy")
#: The settings of a file, parsed once for all pages of a live run as long as its text is the same.
_settings_of = lru_cache(maxsize=2)(lambda config, text: dict(flat(read_settings(config)[0])))


def write_report(run_dir: str | Path, *, live: bool = False) -> Path:
    """Write `report.html` into the run directory, replacing an older one whole; returns its path. The page of a `live`
    run reloads itself.

    Raises:
        DataError: there is no such directory, or it holds nothing of a run.
        ConfigError: another version of verl has written it, in a form that is not read.
    """
    run = Path(run_dir)
    check_run_schema(run)
    known = ("metrics.jsonl", "eval.jsonl", "summary.json", "config.yaml")
    if not any((run / name).is_file() for name in known):
        raise DataError(f"{run} is no run directory: none of {', '.join(known)} is in it")
    summary, environment = json_of(run / "summary.json"), json_of(run / "environment.json")
    metrics, evals = read_rows(run / "metrics.jsonl"), read_rows(run / "eval.jsonl")
    curves = {
        name: [[part[-1][0], fmean(value for _, value in part)] for part in stretches(points, MAX_POINTS)]
        for name, points in curves_in(metrics, evals).items()
    }
    data = {
        "first": FIRST,
        "curves": curves,
        "clock": clock_of(metrics),
        "meanings": meanings(curves),
        "evals": finite(evals),
        "samples": evaluated_samples(run / "completions"),
        "training": training_samples(run / "completions"),
    }
    return write_page(
        run / "report.html",
        "report",
        data,
        title=run.resolve().name,
        refresh=REFRESH_SECONDS if live else None,
        chips=_chips(summary, metrics, run / "config.yaml"),
        hero=_hero(summary, evals),
        tiles=_tiles(summary, metrics),
        run=shlex.quote(str(run)),
        checkpoints=sorted(path.name for path in run.glob("checkpoints/step-*")),
        has_tensorboard=(run / "tensorboard").is_dir(),
        has_completions=(run / "completions").is_dir(),
        config=text_of(run / "config.yaml"),
        environment={
            name: value if isinstance(value, str) else json.dumps(value) for name, value in environment.items()
        },
        attempts=[(file.name, text_of(file)[-4000:]) for file in sorted(run.glob("logs/*.log"))],
    )


def write_page(page: Path, name: str, data: object, **parts: Any) -> Path:
    """Write a page of the template `NAME.html`, whole; returns its path.

    Args:
        data: read by the page's scripts (the curves' one, then `NAME.js`), as JSON.
        parts: of the template, which escapes their texts.
    """
    scripts = "".join((ASSETS / file).read_text(encoding="utf-8") for file in ("charts.js", f"{name}.js"))
    text = _TEMPLATES.get_template(f"{name}.html").render(
        parts,
        script=scripts,
        script_hash=base64.b64encode(hashlib.sha256(scripts.encode()).digest()).decode(),
        style=(ASSETS / "report.css").read_text(encoding="utf-8"),
        data=json.dumps(data, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c"),
    )
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, text.encode(errors="replace").decode())
    return page


def meanings(names: Iterable[str]) -> dict[str, str]:
    """The text of docs/metrics.md for each metric that it has, also of a task's and of held-out data's."""
    rows: dict[str, str] = dict(json.loads((ASSETS / "metrics.json").read_text(encoding="utf-8")))
    texts = {}
    for name in names:
        short = re.sub(r"^(eval/)?task/[^/]+/", r"\1", name)
        keys = (short, short.removeprefix("eval/"))
        if text := next((text for key in keys for pattern, text in rows.items() if fnmatchcase(key, pattern)), None):
            texts[name] = text
    return texts


def _chips(summary: Json, metrics: list[Json], config: Path) -> Iterator[str]:
    yield str(summary.get("state", "not finished"))
    if summary.get("control"):
        yield f"control: {summary['control']}"
    if metrics and (unseen := metrics[-1].get("guard/unseen")):
        yield f"the guard's metrics that never came: {unseen}"
    try:
        settings = _settings_of(config, text_of(config))
    except ConfigError:
        return
    tasks = settings.get("tasks")
    kinds = [str(task.get("type")) for task in tasks] if isinstance(tasks, list) else []
    yield from dict.fromkeys(kinds or filter(None, [settings.get("algorithm.name")]))
    if isinstance(model := settings.get("actor_rollout_ref.model.path"), str):
        yield model.rstrip("/").rsplit("/", 1)[-1]
    if (seed := settings.get("trainer.seed")) is not None:
        yield f"seed {seed}"


def value_text(name: str, value: float, low: object = None, high: object = None, sign: str = "") -> str:
    """A headline metric of an evaluation, or with `sign` "+" a gain in one, with its interval where it has one, in as
    many decimals as give half of the interval two figures."""
    factor, places = scale(name, low, high)
    text, *ends = (f"{number * factor:{sign}.{places}f}" for number in (value, *filter(is_number, (low, high))))
    unit = (" points" if sign else " %") * (name in SHARES)
    return text + unit + (f" ({ends[0]} to {ends[1]})" if len(ends) > 1 else "")


def scale(name: str, low: object, high: object) -> tuple[float, int]:
    """The factor and the decimals with which a headline metric is shown; the decimals follow its interval."""
    factor, least = (100.0, 1) if name in SHARES else (1.0, 3)
    return factor, decimals((high - low) / 2 * factor, least) if is_number(low) and is_number(high) else least


def decimals(half: float, least: int) -> int:
    """Decimals in which an uncertainty of `half` has two figures, from `least` to 6."""
    return min(6, max(least, 1 - math.floor(math.log10(half)))) if half > 0 and math.isfinite(half) else least


def headline(summary: Json, evals: list[Json]) -> tuple[str, list[Json]]:
    """The metric of evaluations that matters in a run, and the evaluations that have it."""
    name = str(summary.get("headline") or (evals[0].get("headline") if evals else None) or "accuracy")
    return name, [row for row in evals if is_number(row.get(name))]


def _hero(summary: Json, evals: list[Json]) -> Json:
    """The headline metric before and after, in large: accuracy, or else the reward."""
    name, scored = headline(summary, evals)
    before = summary.get(f"{name}_before", scored[0][name] if scored else None)
    after = summary.get(f"{name}_after", scored[-1][name] if len(scored) > 1 else None)
    shown: Json = {"name": name}
    for when, value in (("before", before), ("after", after)):
        if is_number(value):
            shown[when] = f"{value * 100:.1f} %" if name in SHARES else f"{value:.{decimals(abs(value), 3)}f}"
    if is_number(before) and is_number(after):
        count, unscored = summary.get("eval_problems"), summary.get("eval_unscored")
        shown["problems"] = f"{count:,} held-out problems" if is_number(count) else "held-out problems"
        if is_number(unscored) and unscored:
            shown["problems"] += f" ({unscored:,} more have no such score)"
        gain = known if is_number(known := summary.get("gain")) else after - before
        text = value_text(name, gain, summary.get("gain_low"), summary.get("gain_high"), "+")
        shown["gain"], _, interval = text.partition(" (")
        shown["interval"] = interval and f"95 % interval {interval[:-1]}"
        shown["is_better"] = gain < 0 if name == "loss" else gain > 0
    return shown


def _tiles(summary: Json, metrics: list[Json]) -> Iterator[tuple[str, str]]:
    """The headline numbers that are known, as (value, label)."""
    for phase, what in (("rollout", "generated"), ("train", "trained")):
        if is_number(value := summary.get(f"{phase}_tokens_per_second")):
            yield f"{value:,.0f}", f"tokens/s {what}"
    if is_number(value := summary.get("peak_memory_bytes")):
        yield f"{value / 1e9:.2f} GB", "peak memory"
    if metrics:
        yield f"{metrics[-1]['step']:,}", "steps"
    if rewards := [row["reward/mean"] for row in metrics if is_number(row.get("reward/mean"))]:
        yield f"{rewards[-1]:.{decimals(abs(rewards[-1]), 3)}f}", "mean reward, last step"
    if is_number(value := summary.get("seconds")):
        yield duration(value), "duration"


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
