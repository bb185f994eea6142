"""The terminal output of a run: a line for each step and, on a terminal, a bar below them."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from verl.report.page import duration

#: What a line shows: label, name in the record, format.
COLUMNS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("kl", "kl", "{:.4f}"),
    ("loss/actor", "loss/actor", "{:+.4f}"),
    ("loss/critic", "loss/critic", "{:.4f}"),
    ("accuracy", "eval/accuracy", "{:.1%}"),
    ("held-out reward", "eval/reward", "{:.3f}"),
    ("held-out pairs right", "eval/pairs/accuracy", "{:.1%}"),
    ("held-out loss", "eval/loss", "{:.4f}"),
    ("rollout tok/s", "rollout/tokens_per_s", "{:,.0f}"),
    ("train tok/s", "train/tokens_per_s", "{:,.0f}"),
)

#: What the line of one of several tasks shows, likewise.
TASK_COLUMNS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("share", "share", "{:.0%}"),
    ("samples/s", "samples_per_s", "{:,.1f}"),
    ("updates/s", "updates_per_s", "{:,.2f}"),
    ("rewards/s", "rewards_per_s", "{:,.1f}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("rejected", "rejection_rate", "{:.0%}"),
)


class TimeLeft:
    """How long a run will go on: the steps and evaluations that are left, each as long as those so far.

    A step lasts from the record before its own to its own, so that work between steps (a checkpoint, the page)
    is part of it. The first is left out once there are others, which find warm what it has to warm up.

    Args:
        total_steps: the length of the run.
        start: the step that it goes on from.
        eval_every: steps from one evaluation to the next, where the last step is evaluated, too; None: none is.
        now: in seconds, as of `note`.
    """

    def __init__(self, total_steps: int, start: int = 0, eval_every: int | None = None, *, now: float = 0.0) -> None:
        self.total_steps, self._step, self._latest = total_steps, start, now
        self._seconds: dict[str, list[float]] = {"step": [], "evaluation": []}
        due = {*range(eval_every, total_steps, eval_every), total_steps} if eval_every else set()
        #: Steps after which an evaluation is to come.
        self.due = {step for step in due if step > start}

    def note(self, step: int, record: Mapping[str, Any], now: float) -> None:
        """A log record of a step or of the evaluation after it."""
        kind = "evaluation" if "time/evaluation" in record else "step"
        self._seconds[kind].append((now - self._latest) / max(step - self._step, 1))
        self._step, self._latest = step, now
        self.due -= {step} if kind == "evaluation" else set()

    def of(self, kind: str) -> float:
        """Seconds of a "step" or an "evaluation", from the latest of them; 0 where there was none."""
        latest = self._seconds[kind][-50:]
        return fmean(latest[1:] or latest or [0.0])

    def seconds(self) -> float | None:
        """Until the end; None: there was no step."""
        left = max(self.total_steps - self._step, 0) * self.of("step") + len(self.due) * self.of("evaluation")
        return left if self._seconds["step"] else None

    def in_words(self) -> str:
        """The time left, with the steps and evaluations that it is made of."""
        steps, evaluations = max(self.total_steps - self._step, 0), len(self.due) if self._seconds["evaluation"] else 0
        counts = {"step": steps, "evaluation": evaluations}
        parts = [f"{n} {kind}{'s' * (n > 1)} of {self.of(kind):.1f} s" for kind, n in counts.items() if n]
        return f"about {duration(self.seconds() or 0.0)} left: {' and '.join(parts) or 'no steps'}"


class ConsoleSink:
    """A log sink that prints; with a length and on a terminal it keeps a progress bar at the bottom.

    Args:
        total_steps: the length of the run; None: no bar and no time left.
        start: the step a resumed run goes on from.
        eval_every: steps from one evaluation to the next; None: the run has no evaluation.
    """

    name = "console"

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        start: int = 0,
        eval_every: int | None = None,
        console: Console | None = None,
    ) -> None:
        self.console = console or Console(soft_wrap=True, highlight=False)
        self.total_steps = total_steps
        self._time = None if total_steps is None else TimeLeft(total_steps, start, eval_every, now=time.monotonic())
        self._has_said = False
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if total_steps is not None and self.console.is_terminal:
            # The bar takes what is left of the line, which so never wraps.
            columns = (TextColumn("{task.description}"), BarColumn(None), TextColumn("{task.fields[text]}"))
            self._bar = Progress(*columns, console=self.console, transient=True, expand=True)
            self._task = self._bar.add_task("starting", total=total_steps, completed=start, text="")
            self._bar.start()

    def phase(self, text: str) -> None:
        """Say what is going on between steps."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        else:
            self.console.print(text, markup=False)

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        left = ""
        if self._time is not None:
            self._time.note(step, record, time.monotonic())
            left = "" if (seconds := self._time.seconds()) is None else duration(seconds)
        total = f"/{self.total_steps}" if self.total_steps is not None else ""
        values = describe(record) or "nothing was measured"  # such as an evaluation of which every sample abstained
        what = "evaluated at step" if "time/evaluation" in record else "step"  # the step's own line is there already
        self.console.print(f"{what} {step}{total}  {values}{f'  left {left}' if left else ''}", markup=False)
        for line in describe_tasks(record):
            self.console.print(f"  {line}", markup=False)
        if left and not self._has_said and self._time is not None:
            self._has_said = True
            self.console.print(self._time.in_words(), markup=False)
        if self._bar is not None and self._time is not None:
            reward = describe({name: record[name] for _, name, _ in COLUMNS[:1] if name in record})
            pace = f"{self._time.of('step'):.1f} s/step"
            text = "  ".join(filter(None, (f"{step}{total}", reward, pace, f"left {left}")))
            self._bar.update(self._task, description="training", completed=step, text=text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def describe(record: Mapping[str, Any], columns: Sequence[tuple[str, str, str]] = COLUMNS) -> str:
    """The numbers that matter of a record, as one line; those it lacks are left out."""
    parts = []
    for label, name, form in columns:
        value = record.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            value = value if abs(value) >= 1e-6 else 0.0  # below it is what rounding made of 0
            text = form.format(value)
            # What is too small for the form is no 0.
            small = re.sub(r"\.\d[f%]", ".2g", form)
            parts.append(f"{label} {text if not value or re.search('[1-9]', text) else small.format(value)}")
        elif value is not None:
            parts.append(f"{label} {value}")
    return "  ".join(parts)


def describe_tasks(record: Mapping[str, Any]) -> list[str]:
    """A line for each of several tasks that took part in the step."""
    names = dict.fromkeys(key.split("/")[1] for key in record if key.startswith("task/") and key.count("/") > 1)
    width = max(map(len, names), default=0)
    lines = []
    for name in names:
        if f"task/{name}/samples" in record:
            numbers = {key: record.get(f"task/{name}/{key}") for _, key, _ in TASK_COLUMNS}
            lines.append(f"{name:<{width}}  {describe(numbers, TASK_COLUMNS)}")
    return lines
