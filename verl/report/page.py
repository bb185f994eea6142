"""`report.html` of a run: one file without external parts, made from what the run directory holds.

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

A torn line or a damaged file is left out, not an error: the report is most
wanted when a run has failed. Texts of prompts and completions are untrusted; they reach the page as data,
never as markup, and the page's content policy lets no script run but its own.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from verl._base.durable import parse_json, read_json, write_atomic
from verl._base.schemas import check_run_schema
from verl.config.load import read_settings
from verl.errors import ConfigError, DataError

P = TypeVar("P")

ASSETS = Path(__file__).parent / "assets"
#: Bounds that keep the page quick: points of a curve, evaluations to compare, training steps, samples of each of these
#: and of all training steps together, characters of a text. What they leave out is said on the page. Of tokens with
#: their numbers, those of the latest steps.
MAX_POINTS, MAX_EVALS, MAX_STEPS, MAX_SAMPLES, MAX_TRAINING, MAX_TEXT = 2000, 8, 400, 300, 6000, 4000
MAX_TOKENS = 50_000
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
_SAMPLE_COLUMNS = ("id", "prompt", "response", "reward")
_TRAINING_COLUMNS = (
    "group", "question", "prompt", "response", "finish", "ground_truth", "reward", "advantage", "length",
)  # fmt: skip
_EPISODE_COLUMNS = (
    "episode",
    "trajectory",
    "trajectory_reward",
    "left_out",
    "calls_left_out",
    "abstain_reason",
    "turns",
)
#: Columns of lists, one entry a token of the response.
TOKENS = ("tokens/text", "tokens/mask", "tokens/advantage", "tokens/entropy", "tokens/mismatch")
#: Files of samples, and rows of all of them together, by kind: of evaluations, and of training steps.
_MOST = {"step": (MAX_EVALS, MAX_EVALS * MAX_SAMPLES), "train": (MAX_STEPS, MAX_TRAINING)}
_LOG_TAIL = 4000
_NO_CURVES = frozenset({"step", "time", "problems", "low", "high"})


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
    curves = {name: _thinned(points) for name, points in curves_in(metrics, evals).items()}
    data = {
        "first": FIRST,
        "curves": curves,
        "clock": clock_of(metrics),
        "meanings": meanings(curves),
        "evals": finite(evals),
        "samples": _samples(run / "completions"),
        "training": _training(run / "completions"),
    }
    config = _text(run / "config.yaml")
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
        "environment": _table(_json(run / "environment.json")),
        "attempts": _attempts(run / "logs"),
    }
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">' if live else ""
    return framed(run.resolve().name, NAV, fill("report.html", body), data, "report.js", refresh)


def framed(title: str, nav: Mapping[str, str], body: str, data: object, script: str, refresh: str = "") -> str:
    """A page as text: `nav` has its sections by their ids, `body` is markup, `script` the name of the page's own, which
    follows that of curves and reads `data`."""
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
    """A template with its parts, in one pass: what stands in a part is not looked at."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset(template))


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def meanings(names: Iterable[str]) -> dict[str, str]:
    """What metrics are, as docs/metrics.md has it, of a task or of held-out data, too; without those of the user's
    own."""
    rows, texts = metric_texts(), {}
    for name in names:
        short = re.sub(r"^(eval/)?task/[^/]+/", r"\1", name)
        for key in (short, short.removeprefix("eval/")):
            if text := next((text for pattern, text in rows.items() if fnmatchcase(key, pattern)), None):
                texts[name] = text
                break
    return texts


def summary_of(run: Path) -> dict[str, Any]:
    """The run's `summary.json`; empty where there is none."""
    return _json(run / "summary.json")


def last_evaluation(run: Path, most: int) -> dict[str, Any] | None:
    """The first samples of the last evaluation that has any, as on the run's own page."""
    samples = _samples(run / "completions")
    return {**samples[-1], "rows": samples[-1]["rows"][:most]} if samples else None


def metric_texts() -> dict[str, str]:
    """What docs/metrics.md says, by metric or pattern; the first that fits counts."""
    return dict(json.loads(_asset("metrics.json")))


def clock_of(metrics: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Rows (step, seconds, tokens), thinned: how long the run had taken by the end of a step, evaluations included, and
    how many response tokens it had sampled, or learned from where it samples none."""
    seconds = tokens = 0.0
    rows = [[0.0, 0.0, 0.0]]
    for row in metrics:
        seconds += sum(row[name] for name in ("time/step", "time/evaluation") if is_number(row.get(name)))
        tokens += next((row[name] for name in ("rollout/tokens", "train/tokens") if is_number(row.get(name))), 0)
        rows.append([row["step"], seconds, tokens])
    stride = math.ceil(len(rows) / MAX_POINTS)
    return [[float(f"{value:.7g}") for value in row] for row in [*rows[:-1:stride], rows[-1]]]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    except OSError:
        return ""


def _json(file: Path) -> dict[str, Any]:
    try:
        return read_json(file, dict[str, Any])  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return {}


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file by step. Rows of one step are one; what stands in several counts as it went last."""
    by_step: dict[float, dict[str, Any]] = {}
    for line in _text(file).split("\n"):
        try:
            row = parse_json(line.encode(), dict[str, Any])
        except ValueError:
            continue
        if is_number(row.get("step")):
            by_step.setdefault(row["step"], {}).update(row)
    return [by_step[step] for step in sorted(by_step)]


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def finite(value: Any) -> Any:
    """`value` as strict JSON can hold it: NaN and infinities become null."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def curves_of(run: Path) -> dict[str, list[list[float]]]:
    """The curves of a run, by metric, as points (step, value); those of evaluations are named "eval/..."."""
    return curves_in(read_rows(run / "metrics.jsonl"), read_rows(run / "eval.jsonl"))


def curves_in(metrics: list[dict[str, Any]], evals: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """Points (step, value) of each metric; those of evaluations are named "eval/..."."""
    return {f"eval/{name}": points for name, points in _points(evals).items()} | _points(metrics)


def _points(rows: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
    curves: dict[str, list[list[float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in _NO_CURVES and is_number(value):
                curves.setdefault(name, []).append([row["step"], value])
    return curves


def _thinned(points: list[list[float]]) -> list[list[float]]:
    """At most `MAX_POINTS` points: each stretch of a longer curve gives its last step and its mean."""
    if len(points) <= MAX_POINTS:
        return points
    return [[part[-1][0], math.fsum(value for _, value in part) / len(part)] for part in stretches(points, MAX_POINTS)]


def stretches(points: Sequence[P], most: int) -> Iterator[Sequence[P]]:
    """At most so many stretches of equal length, but for the last."""
    stride = max(1, math.ceil(len(points) / most))
    return (points[start : start + stride] for start in range(0, len(points), stride))


def _samples(directory: Path) -> list[dict[str, Any]]:
    """Samples of some evaluations, first and last among them; a row is id, prompt, response, reward."""
    return [sample for sample, _ in _steps(directory, "step", _evaluated)]


def _training(directory: Path) -> list[dict[str, Any]]:
    """Samples of the training steps; a row is values by column."""
    steps = [*_steps(directory, "train", _trained)]
    _add_tokens(steps)
    return [sample for sample, _ in steps]


def _evaluated(table: pa.Table) -> list[Any]:
    columns = [_column(table, name) for name in _SAMPLE_COLUMNS]
    return [
        [str(number if id_ is None else id_), _cut(prompt), _cut(response), reward if is_number(reward) else None]
        for number, (id_, prompt, response, reward) in enumerate(zip(*columns, strict=True))
    ]


def _trained(table: pa.Table) -> list[Any]:
    names = [*_TRAINING_COLUMNS, *(name for name in table.column_names if name.startswith("reward/"))]
    if len(set(_column(table, "task"))) > 1:
        names.append("task")
    if any(_column(table, "episode")):
        names += _EPISODE_COLUMNS
    rows = zip(*(_column(table, name) for name in names), strict=True)
    return [{name: _value(value) for name, value in zip(names, row, strict=True)} for row in rows]


def _add_tokens(steps: Sequence[tuple[dict[str, Any], pa.Table]]) -> None:
    """Give samples their `tokens`, where the files have them: rows (text, whether the policy wrote it, advantage,
    entropy, mismatch) of at most `MAX_TOKENS` tokens, the latest steps first."""
    left = MAX_TOKENS
    for sample, table in reversed(steps):
        columns = [_column(table, name) for name in TOKENS]
        for row, (texts, *values) in zip(sample["rows"], zip(*columns, strict=True), strict=True):
            if not isinstance(texts, list):
                continue
            lists = [texts, *([None] * len(texts) if column is None else column for column in values)]
            if any(not isinstance(each, list) or len(each) != len(texts) for each in lists):
                continue
            left -= len(texts)
            if left < 0:
                return
            row["tokens"] = [[str(text), *map(_rounded, numbers)] for text, *numbers in zip(*lists, strict=True)]


def _rounded(value: object) -> float | None:
    return float(f"{value:.3g}") if is_number(value) else None


def _steps(
    directory: Path, kind: str, rows_of: Callable[[pa.Table], list[Any]]
) -> Iterator[tuple[dict[str, Any], pa.Table]]:
    """The steps with samples in `kind-STEP.parquet`, of too many as many as may be, evenly chosen: `{"step", "of",
    "files", "rows"}`, where `of` is how many samples the step has, `files` how many steps there are, and the table of
    the rows. The more steps, the fewer rows of each."""
    names = ((re.fullmatch(rf"{kind}-(\d+)", file.stem), file) for file in directory.glob(f"{kind}-*.parquet"))
    files = {int(name[1]): file for name, file in names if name}
    steps, (most, most_rows) = sorted(files), _MOST[kind]
    if len(steps) > most:
        steps = sorted({steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)})
    for step in steps:
        try:
            table = pq.read_table(files[step])
        except (OSError, pa.ArrowException):
            continue
        first = table.slice(0, min(MAX_SAMPLES, most_rows // len(steps)))
        if rows := rows_of(first):
            yield {"step": step, "of": table.num_rows, "files": len(files), "rows": rows}, first


def _column(table: pa.Table, name: str) -> list[Any]:
    values: list[Any] = table.column(name).to_pylist() if name in table.column_names else [None] * table.num_rows
    return values


def _value(value: object) -> Any:
    """A number, a text, or turns as pairs of whether it is trained and its text; what is neither finite nor text is
    nothing."""
    if is_number(value):
        return value
    if isinstance(value, list):
        return [[turn["trained"], _cut(turn["text"])] for turn in value]
    return None if value is None or isinstance(value, float) else _cut(value)


def _cut(text: object) -> str:
    text = "" if text is None else str(text)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + f" ... ({len(text) - MAX_TEXT} more characters)"


def _chips(summary: dict[str, Any], metrics: list[dict[str, Any]], config: Path) -> Iterator[str]:
    yield str(summary.get("state", "not finished"))
    if summary.get("control"):
        yield f"control: {summary['control']}"
    if metrics and (unseen := metrics[-1].get("guard/unseen")):
        yield f"the guard's metrics that never came: {unseen}"
    try:
        settings = _settings_of(config, _text(config))
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
    """A setting by its path; None where there is none."""
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
    """What a headline metric is multiplied by to be shown, and its decimals: as many as its interval asks for."""
    factor, least = (100.0, 1) if name in SHARES else (1.0, 3)
    return factor, decimals((high - low) / 2 * factor, least) if is_number(low) and is_number(high) else least


def decimals(half: float, least: int) -> int:
    """Decimals in which an uncertainty of `half` has two figures, from `least` to 6."""
    return min(6, max(least, 1 - math.floor(math.log10(half)))) if half > 0 and math.isfinite(half) else least


def _hero(summary: dict[str, Any], evals: list[dict[str, Any]]) -> str:
    """The headline metric before and after, in large: accuracy, or the reward where there is no accuracy."""
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
    """What lies in the run's directory, as links beside the page, and the commands that use it."""
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
        tail = _text(file)[-_LOG_TAIL:]
        blocks.append(f"<details><summary>{html.escape(file.name)}</summary><pre>{html.escape(tail)}</pre></details>")
    return "".join(blocks) or "<p class=none>No logs.</p>"
