"""How long a run will take, what it says of that, and where the time went."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.properties import examples
from tests.trainer import runs
from verl.cli.main import app
from verl.config import build_config, to_yaml
from verl.report.progress import TimeLeft
from verl.run.train import _seconds, train


@given(
    total=st.integers(1, 40),
    every=st.integers(1, 45) | st.none(),
    start=st.integers(0, 20),
    step=st.floats(0.1, 100),
    evaluation=st.floats(0.1, 100),
)
@examples(60)
def test_of_steps_and_evaluations_that_last_alike_it_is_the_time_that_is_left(
    total: int, every: int | None, start: int, step: float, evaluation: float
) -> None:
    """After each record of a run: evaluated before the first step, every so many, and after the last."""
    start = min(start, total - 1)
    evaluated = set() if every is None else {total, *range(every, total, every)}
    plan = [(0, "evaluation")] if every is not None and start == 0 else []
    for number in range(start + 1, total + 1):
        plan += [(number, "step"), *([(number, "evaluation")] if number in evaluated else [])]
    lengths = [step if kind == "step" else evaluation for _, kind in plan]
    left = TimeLeft(total, start, every)
    now, steps, evaluations = 0.0, 0, 0
    for index, (number, kind) in enumerate(plan):
        now += lengths[index]
        left.note(number, {f"time/{kind}": 0.0}, now)
        steps, evaluations = steps + (kind == "step"), evaluations + (kind == "evaluation")
        assert len(left.due) == sum(kind == "evaluation" for _, kind in plan[index + 1 :])
        if steps and (evaluations or not left.due):
            assert left.seconds() == pytest.approx(sum(lengths[index + 1 :]), abs=1e-6)


def test_the_first_step_counts_until_there_are_others() -> None:
    left = TimeLeft(10, eval_every=10, now=100.0)
    assert left.seconds() is None
    left.note(0, {"time/evaluation": 20.0}, 120.0)
    left.note(1, {"time/step": 6.0}, 126.0)
    assert left.in_words() == "about 1 min 14 s left: 9 steps of 6.0 s and 1 evaluation of 20.0 s"
    left.note(2, {"time/step": 3.0}, 130.0)  # and a second for what stands between them
    assert left.seconds() == 8 * 4.0 + 20.0
    later = TimeLeft(30, start=20, eval_every=15, now=0.0)
    later.note(21, {}, 5.0)
    assert (later.seconds(), later.due) == (45.0, {30})  # how long an evaluation takes is not known
    assert later.in_words() == "about 45 s left: 9 steps of 5.0 s"


def test_parts_of_the_time_are_of_this_attempt_and_come_to_all_of_it() -> None:
    rows = [{"step": 0, "time/evaluation": 2.0}, {"step": 1, "time/rollout": 0.25, "time/update": 0.5}]
    now = time.monotonic()
    parts = _seconds((now - 10.0, now, now), rows, 0.125)
    assert list(parts) == ["start", "compiling", "evaluations", "rollout", "update", "report", "the rest"]
    assert [parts[name] for name in ("evaluations", "rollout", "update", "report")] == [2.0, 0.25, 0.5, 0.125]
    assert parts["start"] == pytest.approx(10.0, abs=1.0)
    assert parts["the rest"] == 0.0  # what goes on beside other work counts in full
    now = time.monotonic()
    assert sum(_seconds((now, now, now), [], 0.0).values()) == pytest.approx(0.0, abs=1.0)


def test_the_command_says_what_it_will_do_how_long_it_takes_and_where_the_time_went(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = runs.settings(tmp_path, tiny, **{"trainer.loggers": ["console"], "trainer.total_steps": 2})
    train(build_config(settings))
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "evaluating 6 held-out rows"
    assert re.fullmatch(r"about \d+ s left: 1 step of [\d.]+ s and 1 evaluation of [\d.]+ s", lines[3]), lines
    table = " ".join(out.replace("│", " ").split())
    # Parts of less than 0.05 s are left out.
    assert re.search(r"time \d+\.\d minutes( [a-z ]+ [\d.]+ s)+ └", table), table


def test_the_first_line_comes_before_anything_is_loaded(tiny: Path, tmp_path: Path) -> None:
    """Here nothing can be: it has been said what the run would do all the same."""
    settings = runs.settings(tmp_path, tmp_path / "no model", **{"trainer.loggers": ["console"]})
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(build_config(settings)))
    result = CliRunner().invoke(app, ["train", str(file)])
    assert result.exit_code == 2 and "there is no directory" in result.output
    assert f"verl train {file}: 6 steps of the default algorithm on {tmp_path / 'no model'}; loading" in result.output
