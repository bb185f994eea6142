"""The slow tests of six commits, what each costs, and continuous integration around them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest

from tests.session import (
    MAY_BE_SLOW,
    RECORD,
    SLOW,
    TURNS,
    UNKNOWN_CASES,
    UNKNOWN_SECONDS,
    CpuClock,
    gone,
    halves,
    name_of,
    read_record,
    seconds,
    shares,
)

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("ci", ROOT / "scripts" / "ci.py")
assert SPEC is not None and SPEC.loader is not None
ci = sys.modules["ci"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(ci)

#: Of CPU, for two tests at a time. Of 2,700 s, half is in reserve; the fast tests, the documentation and the
#: installations take the rest of the other.
SHARE_SECONDS = 1000.0
CONFTEST = """
import pathlib, tests.session
from tests.session import *
from tests.session import pytest_addoption, pytest_configure
tests.session.RECORD = pathlib.Path(__file__).with_name("record.json")
"""
TESTS = """
import time, pytest

@pytest.mark.parametrize("number", range(20))
@pytest.mark.slow
def test_one(number):
    pass

@pytest.mark.slow
def test_long():
    begun = time.process_time()
    while time.process_time() < begun + 0.5:
        pass

def test_quick():
    pass

@pytest.mark.slow
@pytest.mark.gpu
def test_device():
    pass
"""
CASES = """
import pytest

@pytest.mark.quick("b")
@pytest.mark.parametrize("case", ["a", "b"])
def test_named(case):
    pass

@pytest.mark.quick(every=4)
@pytest.mark.parametrize("one", range(3))
@pytest.mark.parametrize("other", range(2))
def test_every(one, other):
    pass
"""


def session(folder: Path, *options: str, tests: str = TESTS) -> tuple[int, set[str], str]:
    """Exit status, the tests that ran, and the output."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_numbers.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n slow\n gpu\n quick\n")
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--rootdir", str(folder), *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)
    lines = [line.split() for line in done.stdout.splitlines()]
    return done.returncode, {line[1] for line in lines if line[:1] == ["PASSED"]}, done.stdout + done.stderr


def test_six_turns_run_every_slow_test_once(request: pytest.FixtureRequest) -> None:
    """Those that were collected, and the recorded ones of vLLM, which another environment collects."""
    record = read_record(RECORD)
    tests = sorted({*request.config.stash[SLOW], *(name for name in record if "::" in name)})
    dealt = shares(tests, record)
    assert sorted(test for share in dealt for test in share) == tests
    assert [sorted(share) for share in shares(reversed(tests), record)] == [sorted(share) for share in dealt]


def test_every_case_that_is_quick_is_there(request: pytest.FixtureRequest) -> None:
    single = {argument.partition("[")[0] for argument in request.config.args if "[" in argument}
    unknown = [case for case in request.config.stash[UNKNOWN_CASES] if case.partition("[")[0] not in single]
    assert unknown == []


def test_the_record_names_no_test_that_is_gone(request: pytest.FixtureRequest) -> None:
    assert gone(read_record(RECORD), request.config.stash[MAY_BE_SLOW], ROOT) == []


def test_recorded_shares_are_alike_and_leave_half_of_the_budget() -> None:
    record = read_record(RECORD)
    totals = [seconds(share, record) for share in shares(record, record)]
    assert max(totals) < 1.1 * min(totals)
    assert max(totals) < SHARE_SECONDS


def test_two_halves_are_a_share_and_cost_about_the_same() -> None:
    record = read_record(RECORD)
    for share in shares(record, record):
        first, second = halves(share, record)
        assert sorted([*first, *second]) == sorted(share)
        costs = [seconds(half, record) for half in (first, second)]
        assert max(costs) < 1.5 * min(costs)


def test_an_unknown_test_is_dealt_and_moves_no_other() -> None:
    record = {f"a.py::test[{number}]": 1.0 + number for number in range(20)}
    before = shares(record, record)
    after = shares([*record, "b.py::test"], record)
    assert [share.count("b.py::test") for share in after].count(1) == 1
    assert [[test for test in share if test != "b.py::test"] for share in after] == before
    assert seconds(["b.py::test"], record) == UNKNOWN_SECONDS
    assert seconds(["a.py::test[new]"], record) == median(record.values())


def test_a_file_that_is_recorded_stays_together() -> None:
    record = {"a.py": 50.0, "b.py::test": 1.0}
    tests = [f"a.py::test[{number}]" for number in range(9)]
    assert [share for share in shares(tests, record) if share] == [tests]
    assert seconds(tests, record) == 50.0 and name_of("b.py::test", record) == "b.py::test"


def test_names_that_are_gone(tmp_path: Path) -> None:
    (tmp_path / "other.py").touch()
    record = dict.fromkeys(("a.py::test", "a.py::old", "removed.py::test", "other.py::test", "b.py", "c.py"), 1.0)
    assert gone(record, ["a.py::test", "b.py::test"], tmp_path) == ["a.py::old", "removed.py::test", "c.py"]


def test_a_turn_runs_its_share_and_lists_the_others(tmp_path: Path) -> None:
    record = {"test_numbers.py::test_long": 30.0} | {f"test_numbers.py::test_one[{n}]": 1.0 for n in range(19)}
    (tmp_path / "record.json").write_text(json.dumps(record))
    slow = [*record, "test_numbers.py::test_one[19]"]
    share = shares(slow, record)[2]
    status, ran, output = session(tmp_path, "--turn", "2", "-m", "slow and not gpu")
    assert status == 0 and ran == set(share)
    assert f"turn 2 of {TURNS}: {len(share)} of 21 slow tests" in output
    assert [f"left to turn {turn}: " in output for turn in range(TURNS)] == [turn != 2 for turn in range(TURNS)]
    (tmp_path / "record.json").write_text(json.dumps(record | {"test_numbers.py::test_old": 1.0}))
    status, ran, output = session(tmp_path, "--turn", "2")
    assert status == pytest.ExitCode.USAGE_ERROR and not ran and "take out test_numbers.py::test_old" in output


def test_cases_that_are_named_or_one_in_n_stay_quick(tmp_path: Path) -> None:
    for words, cases in (("not slow", ["named[b]", "every[0-0]", "every[1-1]"]),
                         ("slow", ["named[a]", "every[0-1]", "every[0-2]", "every[1-0]", "every[1-2]"])):  # fmt: skip
        status, ran, _ = session(tmp_path, "-m", words, tests=CASES)
        assert status == 0 and ran == {f"test_numbers.py::test_{case}" for case in cases}


@pytest.mark.slow
def test_seconds_are_recorded_beside_what_was_known(tmp_path: Path) -> None:
    file = tmp_path / "seconds.json"
    file.write_text(json.dumps({"other.py::test": 7.0}))
    status, ran, _ = session(tmp_path, "--record-seconds", str(file), "-k", "long or quick")
    record = json.loads(file.read_text())
    assert status == 0 and record.keys() == ran | {"other.py::test"}
    assert record["other.py::test"] == 7.0 and 0.5 <= record["test_numbers.py::test_long"] < 2.0
    assert record["test_numbers.py::test_quick"] < 0.4


@pytest.mark.slow
def test_the_clock_counts_children_that_ended_and_daemons() -> None:
    burn = "import time\nwhile time.process_time() < {}: pass"
    clock = CpuClock()
    clock.start()
    before = clock.read()
    for _ in range(2):
        subprocess.run([sys.executable, "-c", burn.format(0.3)], check=True, timeout=60)
    assert 0.6 <= clock.read() - before < 1.5
    # A daemon outlives the shell that starts it, which waits until it was seen.
    subprocess.run(["sh", "-c", f"setsid {sys.executable} -c '{burn.format(1)}' & sleep 0.8"], check=True, timeout=60)
    until = time.monotonic() + 60
    while clock.read() - before < 1.3:
        assert time.monotonic() < until
        time.sleep(0.1)


def repository(folder: Path, commits: int) -> Path:
    def git(*words: str) -> None:
        subprocess.run(["git", *words], cwd=folder, check=True, timeout=60, capture_output=True)

    git("init", "--quiet")
    for number in range(commits):
        git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--allow-empty", "--message", str(number))
    return folder


def test_six_successive_commits_have_six_turns(tmp_path: Path) -> None:
    folder = repository(tmp_path, 1)
    turns = [ci.turn(folder)]
    for _ in range(5):
        turns.append(ci.turn(repository(folder, 1)))
    assert [turn for turn, _ in turns] == [1, 2, 3, 4, 5, 0]
    assert turns[-1][1] == "by the number of commits, 6"
    tried = [name for turn, _ in turns for name in ci.ENVIRONMENTS[turn]]
    assert len(tried) == len(set(tried)) == 9
    assert len({str(variables) for variables in ci.PROCESSORS}) == ci.TURNS


def test_a_shallow_history_has_turns_by_the_hash(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = repository(tmp_path / "whole", 3)
    command = ["git", "clone", "--quiet", "--depth", "1", f"file://{whole}", str(tmp_path / "shallow")]
    subprocess.run(command, check=True, timeout=60)
    number, why = ci.turn(tmp_path / "shallow")
    commit = ci.git(whole, "rev-parse", "HEAD")
    assert number == int(commit, 16) % 6 and commit in why and "shallow" in why


def run_ci(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], parts: list[ci.Part]) -> tuple[int, str]:
    monkeypatch.setattr(ci, "parts", lambda turn: parts)
    with pytest.raises(SystemExit) as end:
        ci.main()
    return int(end.value.code or 0), capfd.readouterr().out


def part(code: str, **options: bool) -> ci.Part:
    return ci.Part([sys.executable, "-c", code], **options)


def test_ci_says_what_ran_what_was_slowest_and_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tests = "print('left to turn 9: 3 tests')\nprint('{}s call     a.py::test_{}')\nprint('=== {} passed in 3.00s ===')"
    parts = [
        part(tests.format(1.5, "a", 12)), part(tests.format(20.5, "b", 30)),
        part(f"raise SystemExit({ci.NOT_MADE})", may_be_missing=True),
    ]  # fmt: skip
    status, said = run_ci(monkeypatch, capfd, parts)
    assert status == 0
    said = said[said.index("The ten slowest") :]
    order = ["20.5 s  call     a.py::test_b", "1.5 s  call     a.py::test_a", "left to turn 9: 3 tests", "12 passed",
             "30 passed", "not run: the environment cannot be made here"]  # fmt: skip
    assert [said.index(words) for words in order] == sorted(said.index(words) for words in order)


@pytest.mark.parametrize("code", [1, 124, ci.NOT_MADE])
def test_ci_fails_with_a_part_and_runs_the_rest(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    status, said = run_ci(monkeypatch, capfd, [part(f"raise SystemExit({code})"), part("print('the rest')")])
    assert status == 1 and f"FAILED with exit status {code}" in said and "\nthe rest\n" in said


def test_on_a_slow_machine_a_turn_does_half_of_its_share(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for most, is_halved in ((0.0, True), (60.0, False)):
        monkeypatch.setattr(ci, "SLOW_MACHINE_SECONDS", most)
        echo = "import sys; print(*sys.argv[1:])"
        share = ci.Part([sys.executable, "-c", echo, "TURN=3"])
        status, said = run_ci(monkeypatch, capfd, [part("print('quick')"), share, part("print('other')")])
        half = ci.commits(ci.ROOT)[0] // ci.TURNS % 2
        assert status == 0 and (f"\nTURN=3 HALF={half}\n" in said) == is_halved == ("This machine is slow" in said)


def test_ci_fails_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CI_BUDGET_SECONDS", "1.5")
    where = "import time\ntry: time.sleep(100)\nexcept KeyboardInterrupt: print('here')"
    begun = time.monotonic()
    status, said = run_ci(monkeypatch, capfd, [part(where), part("print('later')", may_be_missing=True)])
    assert status == 1 and time.monotonic() - begun < 60
    assert "\nhere\n" in said and "FAILED: the time was up" in said and "NOT RUN: the time was up before" in said
    assert "print('later')" in said[said.rindex("\nFAILED: ") :]
