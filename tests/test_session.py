"""The order and the time of a test session: how slow tests are divided over commits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HOOKS = (
    "from tests.session import pytest_addoption, pytest_collection_modifyitems, pytest_runtest_protocol, "
    "pytest_sessionfinish\n"
)
TESTS = """
import time, pytest

@pytest.mark.parametrize("number", range(8))
def test_one(number):
    time.sleep(0.01)
    assert number not in {wrong}
"""


def session(folder: Path, *options: str, wrong: str = "()") -> tuple[int, list[int], str]:
    """Exit status, numbers of the tests in the order in which they ran, and the output."""
    (folder / "conftest.py").write_text(HOOKS)
    (folder / "test_numbers.py").write_text(TESTS.replace("{wrong}", wrong))
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir", str(folder), *options]
    done = subprocess.run([*command, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    ran = [
        line.split("[", 1)[1].split("]")[0] for line in done.stdout.splitlines() if "test_one[" in line and "%]" in line
    ]
    return done.returncode, list(map(int, ran)), done.stdout


def test_each_commit_has_an_order_of_its_own_and_all_tests(tmp_path: Path) -> None:
    orders = [session(tmp_path, *options)[1] for options in ((), ("--shard", "a"), ("--shard", "a"), ("--shard", "b"))]
    assert orders[0] == list(range(8)) == sorted(orders[1]) == sorted(orders[3])
    assert orders[1] == orders[2]
    assert len({tuple(order) for order in orders}) == 3


def test_no_test_begins_after_the_time_and_that_is_no_failure(tmp_path: Path) -> None:
    status, ran, output = session(tmp_path, "--shard", "a", "--seconds", "0")
    assert status == 0 and len(ran) == 1
    assert "the time is up: 7 of 8 tests are left to other commits" in output
    status, again, _ = session(tmp_path, "--shard", "a", "--seconds", "0", wrong=f"({ran[0]},)")
    assert status != 0 and again == ran


def test_a_session_that_is_interrupted_otherwise_is_none(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import nothing_of_that_name\n")
    assert session(tmp_path, "--seconds", "0")[0] == pytest.ExitCode.INTERRUPTED
