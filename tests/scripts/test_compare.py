"""The command that compares two checkouts, and the numbers on record."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from scripts import compare
from scripts.compare import BOUND, PROCESSES, RECORDS, ROOT, RUNS, SMALL, CannotRunError, Worker
from tests import ranks

SCRIPT = ROOT / "scripts" / "compare.py"


def command(*args: str | Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(SCRIPT), *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, timeout=280, check=False)


def copy(folder: Path) -> Path:
    """A checkout of its own, as it is now."""
    shutil.copytree(ROOT / "verl", folder / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def leave(folder: Path, steps: list[dict[str, Any]], **weights: torch.Tensor) -> Path:
    """What a run leaves behind."""
    folder.mkdir()
    (folder / "grpo.json").write_text(json.dumps(steps))
    save_file(weights, folder / "grpo.safetensors")
    return folder


#: A timed process; its CPU seconds, with some noise, come from the checkout.
STAND_IN = """
import sys
from pathlib import Path
import verl
print("ready", flush=True)
for line in sys.stdin:
    print(verl.SECONDS[line.strip()] * (1 + 0.2 * verl.noise()), flush=True)
"""


def timed(folder: Path, rollout: float) -> Path:
    (folder / "verl").mkdir(parents=True)
    source = f"import random\nnoise = random.Random(0).random\nSECONDS = {{'rollout': {rollout}, 'step': 2.0}}\n"
    (folder / "verl" / "__init__.py").write_text(source)
    return folder


@pytest.mark.quick("grpo", "dpo")
@pytest.mark.parametrize("name", SMALL)
def test_the_numbers_on_record_have_not_moved(tmp_path: Path, name: str) -> None:
    ranks_of = {run: count for names, count in PROCESSES.items() for run in names}
    if ranks_of[name] == 1:
        ranks.alone(RUNS, tmp_path, name)
    else:
        ranks.job(ranks_of[name], RUNS, tmp_path, name)
    record = json.loads((RECORDS / f"{name}.json").read_text())
    found = compare.metrics_of(tmp_path / f"{name}.json")
    assert len(record) == 5 and "grad_norm/actor" in record[0]
    assert [*compare.differences(record, found, compare.is_near)] == [], "see `scripts/compare.py --record`"
    assert compare.new_names(record, found) == [], "see `scripts/compare.py --record`"


def test_every_record_is_of_a_run_and_has_no_number_of_a_clock() -> None:
    assert sorted(file.stem for file in RECORDS.iterdir()) == sorted(SMALL)
    for name in SMALL:
        record = json.loads((RECORDS / f"{name}.json").read_text())
        assert record == compare.metrics_of(RECORDS / f"{name}.json")
        assert len({json.dumps(step) for step in record}) == 5


def test_what_differs_is_named_with_its_step_and_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight, nan = torch.arange(6, dtype=torch.float64), math.nan
    first = {"loss/actor": 0.5, "kl": nan, "time/step": 1.0, "rollout/tokens_per_s": 3.0, "time": 5.0}
    old = leave(tmp_path / "old", [first, first], w=weight)
    other_times = {**first, "time/step": 2.0, "rollout/tokens_per_s": 4.0, "time": 6.0, "new": 1.0}
    same = leave(tmp_path / "same", [other_times, other_times], w=weight)
    assert compare.report("grpo", old, same)
    assert "equal: 2 steps, 2 metrics" in (text := capsys.readouterr().out) and "only in NEW: new" in text
    moved = {**first, "loss/actor": 0.5 * (1 + 1e-12)}
    new = leave(tmp_path / "new", [first, moved], w=weight * (1 + 1e-15))
    assert not compare.report("grpo", old, new)
    text = capsys.readouterr().out
    assert (
        "DIFFERENT in 2 places" in text
        and "step 2, loss/actor: 0.5 -> 0.5000000000005 (a difference of 5e-13, 1e-12" in text
    )
    assert "weight w: 5 of 6 numbers, by 5.3e-15 at most" in text
    lost = leave(tmp_path / "lost", [{"kl": nan}], w=weight.float(), v=weight)
    assert not compare.report("grpo", old, lost)
    text = capsys.readouterr().out
    for words in (
        "loss/actor: 0.5 -> it is gone",
        "2 steps -> 1 steps",
        "float64 [6] -> torch.float32",
        "v: it is new",
    ):
        assert words in text
    assert not compare.report("grpo", old, leave(tmp_path / "none", [first, {**first, "kl": 0.0}], w=weight))


def test_a_record_moves_only_beyond_its_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "grpo.json"
    assert not compare._write_record(file, [{"loss": 1.0}]) and "it is new" in capsys.readouterr().out
    before = file.read_text()
    assert compare._write_record(file, [{"loss": 1 + BOUND / 2}]) and file.read_text() == before
    assert "within 1e-09" in capsys.readouterr().out
    assert not compare._write_record(file, [{"loss": 1 + 2 * BOUND, "more": 0.0}])
    text = capsys.readouterr().out
    assert "step 1, loss: 1.0 -> 1.000000002" in text and "new metrics: more" in text and file.read_text() != before


def test_a_checkout_that_cannot_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for other, words in (("empty", "empty is no checkout"), ("nothing", "neither a directory nor a revision")):
        done = command(ROOT, tmp_path / other, "--only", "grpo")
        assert done.returncode == 2 and words in done.stderr, done.stderr
    broken = timed(tmp_path / "broken", 1.0)
    (broken / "verl" / "__main__.py").write_text("raise OSError('no such thing')\n")
    with pytest.raises(CannotRunError, match=r"this failed in .*broken, exit status 1:(?s:.)*no such thing"):
        compare.call(broken, "this", "-m", "verl", cwd=tmp_path)
    with pytest.raises(CannotRunError, match=r"no end after 0\.01 s"):
        compare.call(ROOT, "this", "-c", "import time; time.sleep(60)", cwd=tmp_path, seconds=0.01)


def test_a_revision_has_a_worktree_for_as_long_as_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "verl").mkdir()
    for text in ("x = 1\n", "x = 2\n"):
        (tmp_path / "verl" / "__init__.py").write_text(text)
        for args in (["init", "--quiet"], ["add", "verl"], ["commit", "--quiet", "-m", "c"]):
            subprocess.run([*git, *args], check=True)
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    with compare.checkout_of("HEAD~1") as path:
        assert (path / "verl" / "__init__.py").read_text() == "x = 1\n"
    assert not path.exists()
    listed = subprocess.run([*git, "worktree", "list"], capture_output=True, text=True, check=True)
    assert len(listed.stdout.splitlines()) == 1


@pytest.mark.slow
def test_a_change_of_1e_12_in_a_loss_is_named(tmp_path: Path) -> None:
    same, changed = copy(tmp_path / "same"), copy(tmp_path / "changed")
    losses = changed / "verl" / "algorithms" / "losses.py"
    line = "    loss = torch.maximum(free, kept)\n"
    text = losses.read_text()
    assert text.count(line) == 1
    losses.write_text(text.replace(line, f"{line[:-1]} * (1 + 1e-12)\n"))
    done = command(ROOT, same, "--only", "grpo", "dpo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "equal"
    done = command(ROOT, changed, "--only", "grpo", "dpo")
    assert done.returncode == 1, done.stderr
    assert "grpo     DIFFERENT" in done.stdout and "step 1, loss/policy: " in done.stdout
    assert "1e-12 of it" in done.stdout and "dpo      equal: 5 steps" in done.stdout


def test_times_are_compared_side_by_side_and_more_work_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "timing.py").write_text(STAND_IN)
    monkeypatch.setattr(compare, "TIMING", tmp_path / "timing.py")
    old, same = timed(tmp_path / "old", 1.0), timed(tmp_path / "same", 1.0)
    assert compare.time_both(old, same)
    assert capsys.readouterr().out.count("1.000 of OLD's CPU seconds (1.000 to 1.000): as fast") == 2
    assert not compare.time_both(old, timed(tmp_path / "slower", 1.05))
    text = capsys.readouterr().out
    assert "rollout  1.050 of" in text and "DIFFERENT: NEW takes 5.0% more" in text and "step     1.000" in text


def test_a_timed_process_that_ends_or_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "TIMING", tmp_path / "timing.py")
    for text, words in (("raise OSError('gone')", "gone"), ("import time; time.sleep(60)", "no answer in 0.5 s")):
        (tmp_path / "timing.py").write_text(text)
        worker = Worker(ROOT, tmp_path / "log")
        with pytest.raises(CannotRunError, match=words):
            worker.answer(20 if words == "gone" else 0.5)
        assert worker.process.returncode is not None


@pytest.mark.slow
def test_the_timed_work_is_done(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"MODEL": tiny, "PAIRS": 1, "WINDOWS": {"rollout": 1, "step": 1}, "TOLERANCE": math.inf}.items():
        monkeypatch.setattr(compare, name, value)
    assert compare.time_both(ROOT, ROOT)
    assert capsys.readouterr().out.count("of OLD's CPU seconds") == 2
