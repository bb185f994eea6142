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
import html
import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl._base.durable import write_atomic
from verl._base.schemas import check_run_schema
from verl.config.load import read_settings
from verl.errors import ConfigError, DataError
from verl.report.reading import (
    clock_of,
    curves_in,
    evaluated_samples,
    finite,
    is_number,
    json_of,
    read_rows,
    summary_of,
    text_of,
    thinned,
    training_samples,
)

ASSETS = Path(__file__).parent / "assets"
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
#: The sections of the page, by their ids.
NAV = {"curves": "Curves", "training": "Training", "completions": "Evaluation", "settings": "Settings"}
_LOG_TAIL = 4000


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
    page = run / "report.html"
    write_atomic(page, render(run, live).encode(errors="replace").decode())
    return page


def render(run: Path, live: bool = False) -> str:
    """The page as text."""
    summary = summary_of(run)
    metrics, evals = read_rows(run / "metrics.jsonl"), read_rows(run / "eval.jsonl")
    curves = {name: thinned(points) for name, points in curves_in(metrics, evals).items()}
    data = {
        "first": FIRST,
        "curves": curves,
        "clock": clock_of(metrics),
        "meanings": meanings(curves),
        "evals": finite(evals),
        "samples": evaluated_samples(run / "completions"),
        "training": training_samples(run / "completions"),
    }
    config = text_of(run / "config.yaml")
    body = {
        "title": html.escape(run.resolve().name),
        "curves": _asset("curves.html"),
        "chips": "".join(
            f"<span class=chip>{html.escape(text)}</span>" for text in _chips(summary, metrics, run / "config.yaml")
        ),
        "hero": _hero(summary, evals),
        "tiles": "".join(
            f"<div class=tile><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>"
            for value, label in _tiles(summary, metrics)
        ),
        "files": _files(run),
        "config": html.escape(config or "config.yaml is missing"),
        "environment": _table(json_of(run / "environment.json")),
        "attempts": _attempts(run / "logs"),
    }
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">' if live else ""
    return framed(run.resolve().name, NAV, fill("report.html", body), data, "report.js", refresh)


def framed(title: str, nav: Mapping[str, str], body: str, data: object, script: str, refresh: str = "") -> str:
    """A page as text.

    Args:
        nav: its sections by their ids.
        body: markup.
        data: read by the scripts, as JSON.
        script: the page's own script, which runs after the curves' one.
    """
    scripts = _asset("charts.js") + _asset(script)
    parts = {
        "title": html.escape(title),
        "nav": "".join(f'<a href="#{name}">{label}</a>' for name, label in nav.items()),
        "body": body,
        "refresh": refresh,
        "script_hash": base64.b64encode(hashlib.sha256(scripts.encode()).digest()).decode(),
        "style": _asset("report.css"),
        "script": scripts,
        "data": json.dumps(data, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c"),
    }
    return fill("frame.html", parts)


def fill(template: str, parts: Mapping[str, str]) -> str:
    """A template with its parts, in one pass: templates within a part are not filled in."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset(template))


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def meanings(names: Iterable[str]) -> dict[str, str]:
    """The text of docs/metrics.md for each metric that it has, also of a task's and of held-out data's."""
    rows: dict[str, str] = dict(json.loads(_asset("metrics.json")))
    texts = {}
    for name in names:
        short = re.sub(r"^(eval/)?task/[^/]+/", r"\1", name)
        for key in (short, short.removeprefix("eval/")):
            if text := next((text for pattern, text in rows.items() if fnmatchcase(key, pattern)), None):
                texts[name] = text
                break
    return texts


def _chips(summary: dict[str, Any], metrics: list[dict[str, Any]], config: Path) -> Iterator[str]:
    yield str(summary.get("state", "not finished"))
    if summary.get("control"):
        yield f"control: {summary['control']}"
    if metrics and (unseen := metrics[-1].get("guard/unseen")):
        yield f"the guard's metrics that never came: {unseen}"
    try:
        settings = _settings_of(config, text_of(config))
    except ConfigError:
        return
    tasks = _setting(settings, "tasks")
    kinds = [str(_setting(task, "type")) for task in tasks] if isinstance(tasks, list) else []
    yield from dict.fromkeys(kinds or filter(None, [_setting(settings, "algorithm", "name")]))
    if isinstance(model := _setting(settings, "actor_rollout_ref", "model", "path"), str):
        yield model.rstrip("/").rsplit("/", 1)[-1]
    if (seed := _setting(settings, "trainer", "seed")) is not None:
        yield f"seed {seed}"


@lru_cache(maxsize=2)
def _settings_of(config: Path, text: str) -> dict[str, Any]:
    """Parsed once for all pages of a run: `text`, the file's own, tells when it is another file."""
    return read_settings(config)


def _setting(settings: Any, *path: str) -> Any:
    """A setting by its path; None if it is not set."""
    for name in path:
        settings = settings.get(name) if isinstance(settings, dict) else None
    return settings


def gain_text(name: str, gain: float, low: object, high: object) -> tuple[str, str]:
    """A gain in a headline metric and its interval, in as many decimals as give half of the interval two figures."""
    factor, places = scale(name, low, high)
    unit = " points" if name in SHARES else ""
    if not is_number(low) or not is_number(high):
        return f"{gain * factor:+.{places}f}{unit}", ""
    form = f"+.{places}f"
    return f"{gain * factor:{form}}{unit}", f"95 % interval {low * factor:{form}} to {high * factor:{form}}"


def value_text(name: str, value: float, low: object, high: object) -> str:
    """A headline metric of an evaluation, with its interval where it has one."""
    factor, places = scale(name, low, high)
    text = f"{value * factor:.{places}f}{' %' if name in SHARES else ''}"
    if not is_number(low) or not is_number(high):
        return text
    return f"{text} ({low * factor:.{places}f} to {high * factor:.{places}f})"


def scale(name: str, low: object, high: object) -> tuple[float, int]:
    """The factor and the decimals with which a headline metric is shown; the decimals follow its interval."""
    factor, least = (100.0, 1) if name in SHARES else (1.0, 3)
    return factor, decimals((high - low) / 2 * factor, least) if is_number(low) and is_number(high) else least


def decimals(half: float, least: int) -> int:
    """Decimals in which an uncertainty of `half` has two figures, from `least` to 6."""
    return min(6, max(least, 1 - math.floor(math.log10(half)))) if half > 0 and math.isfinite(half) else least


def _hero(summary: dict[str, Any], evals: list[dict[str, Any]]) -> str:
    """The headline metric before and after, in large: accuracy, or else the reward."""
    name = str(summary.get("headline") or (evals[0].get("headline") if evals else None) or "accuracy")
    scored = [row[name] for row in evals if is_number(row.get(name))]
    before = summary.get(f"{name}_before", scored[0] if scored else None)
    after = summary.get(f"{name}_after", scored[-1] if len(scored) > 1 else None)
    label = html.escape(name)
    if not is_number(before) or not is_number(after):
        for value, when in ((before, "before"), (after, "after")):
            if is_number(value):
                return f"<div class=big><span>{_headline(name, value)}</span></div><p>{label} {when} training</p>"
        return "<p class=none>No evaluation yet.</p>"
    count, unscored = summary.get("eval_problems"), summary.get("eval_unscored")
    problems = f"{count:,} held-out problems" if is_number(count) else "held-out problems"
    if is_number(unscored) and unscored:
        problems += f" ({unscored:,} more have no such score)"
    gain = known if is_number(known := summary.get("gain")) else after - before
    text, interval = gain_text(name, gain, summary.get("gain_low"), summary.get("gain_high"))
    is_better = gain < 0 if name == "loss" else gain > 0
    return (
        f"<div class=big><span class=before>{_headline(name, before)}</span><span class=arrow>→</span>"
        f"<span class=after>{_headline(name, after)}</span></div><p>{label} on {problems}, before and after</p>"
        f"<p class='gain {'up' if is_better else 'down'}'>{text} <small>{interval}</small></p>"
    )


def _headline(name: str, value: float) -> str:
    return f"{value * 100:.1f} %" if name in SHARES else f"{value:.{decimals(abs(value), 3)}f}"


def _tiles(summary: dict[str, Any], metrics: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """The headline numbers that are known, as (value, label)."""
    for key, label in (
        ("rollout_tokens_per_second", "tokens/s generated"),
        ("train_tokens_per_second", "tokens/s trained"),
    ):
        if is_number(value := summary.get(key)):
            yield f"{value:,.0f}", label
    if is_number(value := summary.get("peak_memory_bytes")):
        yield f"{value / 1e9:.2f} GB", "peak memory"
    if metrics:
        yield f"{metrics[-1]['step']:,}", "steps"
    rewards = [row["reward/mean"] for row in metrics if is_number(row.get("reward/mean"))]
    if rewards:
        yield f"{rewards[-1]:.{decimals(abs(rewards[-1]), 3)}f}", "mean reward, last step"
    if is_number(value := summary.get("seconds")):
        yield duration(value), "duration"


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _files(run: Path) -> str:
    """Links to the files next to the page, and the commands that use them."""
    quoted = shlex.quote(str(run))
    checkpoints = sorted(run.glob("checkpoints/step-*"))
    rows = [("Checkpoints", " ".join(_link(path.relative_to(run)) for path in checkpoints) or "none yet")]
    if checkpoints:
        rows.append(("As a Hugging Face directory", f"<code>verl export {html.escape(quoted)} OUT</code>"))
    if (run / "tensorboard").is_dir():
        rows.append(("TensorBoard", f"<code>tensorboard --logdir {html.escape(quoted)}/tensorboard</code>"))
    if (run / "completions").is_dir():
        rows.append(("Completions, as Parquet", _link(Path("completions"))))
    return "<table>" + "".join(f"<tr><th>{name}</th><td>{content}</td></tr>" for name, content in rows) + "</table>"


def _link(path: Path) -> str:
    return f'<a class=link href="{html.escape(path.as_posix())}">{html.escape(path.name)}</a>'


def _table(content: dict[str, Any]) -> str:
    texts = {str(key): value if isinstance(value, str) else json.dumps(value) for key, value in content.items()}
    rows = "".join(table_row(key, text) for key, text in texts.items())
    return f"<table>{rows}</table>" if texts else "<p class=none>Not recorded.</p>"


def table_row(head: str, *cells: str) -> str:
    """Texts as a row of a table."""
    return f"<tr><th>{html.escape(head)}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"


def _attempts(logs: Path) -> str:
    """Each attempt's log with the end of its text; a run that was resumed has several."""
    blocks = []
    for file in sorted(logs.glob("*.log")):
        tail = text_of(file)[-_LOG_TAIL:]
        blocks.append(f"<details><summary>{html.escape(file.name)}</summary><pre>{html.escape(tail)}</pre></details>")
    return "".join(blocks) or "<p class=none>No logs.</p>"
