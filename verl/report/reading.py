"""The files of a run's directory, as its page, comparisons and searches read them.

A torn line or a damaged file is left out, not an error: the report is most wanted when a run has failed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from verl._base.durable import parse_json, read_json

P = TypeVar("P")
#: An object of JSON, and the points of a curve: step and value, or more.
Json = dict[str, Any]
Points = list[list[float]]

#: Bounds that keep the page quick: points of a curve, evaluations to compare, training steps, samples of each of these
#: and of all training steps together, characters of a text. What they leave out is said on the page. Of tokens with
#: their numbers, those of the latest steps.
MAX_POINTS, MAX_EVALS, MAX_STEPS, MAX_SAMPLES, MAX_TRAINING, MAX_TEXT = 2000, 8, 400, 300, 6000, 4000
MAX_TOKENS = 50_000
_TRAINING_COLUMNS = (
    "group", "question", "prompt", "response", "finish", "ground_truth", "reward", "advantage", "length",
)  # fmt: skip
_EPISODE_COLUMNS = (
    "episode", "trajectory", "trajectory_reward", "left_out", "calls_left_out", "abstain_reason", "turns",
)  # fmt: skip
#: Columns of lists, one entry a token of the response.
TOKENS = ("tokens/text", "tokens/mask", "tokens/advantage", "tokens/entropy", "tokens/mismatch")


def read_rows(file: Path) -> list[Json]:
    """The rows of a JSONL file by step. Rows of one step are merged; the last value of a metric counts."""
    by_step: dict[float, Json] = {}
    for line in text_of(file).split("\n"):
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


def curves_in(metrics: list[Json], evals: list[Json]) -> dict[str, Points]:
    """Points (step, value) of each metric; metrics of evaluations are named "eval/..."."""
    curves: dict[str, Points] = {}
    for prefix, rows in (("eval/", evals), ("", metrics)):
        for row in rows:
            for name, value in row.items():
                if name not in ("step", "time", "problems", "low", "high") and is_number(value):
                    curves.setdefault(f"{prefix}{name}", []).append([row["step"], value])
    return curves


def stretches(points: Sequence[P], most: int) -> Iterator[Sequence[P]]:
    """At most `most` stretches, of equal length but for the last."""
    stride = max(1, math.ceil(len(points) / most))
    return (points[start : start + stride] for start in range(0, len(points), stride))


def clock_of(metrics: Sequence[Mapping[str, Any]]) -> Points:
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


def evaluated_samples(directory: Path) -> list[Json]:
    """Samples of some evaluations, first and last among them; a row is id, prompt, response, reward."""
    steps = []
    for step, table in _steps(directory, "step", MAX_EVALS, MAX_EVALS * MAX_SAMPLES):
        columns = (_column(table, name) for name in ("id", "prompt", "response", "reward"))
        step["rows"] = [
            [str(number if id_ is None else id_), _cut(prompt), _cut(response), reward if is_number(reward) else None]
            for number, (id_, prompt, response, reward) in enumerate(zip(*columns, strict=True))
        ]
        steps.append(step)
    return steps


def training_samples(directory: Path) -> list[Json]:
    """Samples of the training steps; a row is values by column."""
    steps = [*_steps(directory, "train", MAX_STEPS, MAX_TRAINING)]
    for step, table in steps:
        names = [*_TRAINING_COLUMNS, *(name for name in table.column_names if name.startswith("reward/"))]
        if len(set(_column(table, "task"))) > 1:
            names.append("task")
        if any(_column(table, "episode")):
            names += _EPISODE_COLUMNS
        rows = zip(*(_column(table, name) for name in names), strict=True)
        step["rows"] = [{name: _value(value) for name, value in zip(names, row, strict=True)} for row in rows]
    _add_tokens(steps)
    return [step for step, _ in steps]


def _add_tokens(steps: Sequence[tuple[Json, pa.Table]]) -> None:
    """Give samples their `tokens`, where the files have them: rows (text, whether the policy wrote it, advantage,
    entropy, mismatch) of at most `MAX_TOKENS` tokens, the latest steps first."""
    left = MAX_TOKENS
    for step, table in reversed(steps):
        columns = [_column(table, name) for name in TOKENS]
        for row, (texts, *values) in zip(step["rows"], zip(*columns, strict=True), strict=True):
            if not isinstance(texts, list):
                continue
            lists = [[None] * len(texts) if column is None else column for column in values]
            if any(not isinstance(each, list) or len(each) != len(texts) for each in lists):
                continue
            left -= len(texts)
            if left < 0:
                return
            row["tokens"] = [
                [str(text), *(float(f"{number:.3g}") if is_number(number) else None for number in numbers)]
                for text, *numbers in zip(texts, *lists, strict=True)
            ]


def _steps(directory: Path, kind: str, most: int, most_rows: int) -> Iterator[tuple[Json, pa.Table]]:
    """`{"step", "of", "files"}` and the table of the steps with samples in `kind-STEP.parquet`: at most `most`, evenly
    chosen, with `most_rows` rows together. `of` is how many samples the step has, `files` how many steps there are."""
    names = ((re.fullmatch(rf"{kind}-(\d+)", file.stem), file) for file in directory.glob(f"{kind}-*.parquet"))
    files = {int(name[1]): file for name, file in names if name}
    steps = sorted(files)
    if len(steps) > most:
        steps = sorted({steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)})
    for step in steps:
        try:
            table = pq.read_table(files[step])
        except (OSError, pa.ArrowException):
            continue
        if table.num_rows:
            first = table.slice(0, min(MAX_SAMPLES, most_rows // len(steps)))
            yield {"step": step, "of": table.num_rows, "files": len(files)}, first


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


def text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    except OSError:
        return ""


def json_of(file: Path) -> Json:
    try:
        return read_json(file, dict[str, Any])  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return {}
