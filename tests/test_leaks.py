"""A session of tests that leaves something behind fails, and says what."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.leaks import LEFT_BEHIND, MARK

ROOT = Path(__file__).parent.parent
CONFTEST = "from tests.leaks import pytest_configure, pytest_sessionfinish\n"
LISTENER = (
    "import socket, time; server = socket.create_server(('127.0.0.1', 0)); "
    "print(server.getsockname()[1], flush=True); time.sleep(60)"
)


def session(folder: Path, test: str, *options: str) -> tuple[int, str]:
    """Exit status and output of a session of one test."""
    (folder / "conftest.py").write_text(CONFTEST + "import tests.leaks\ntests.leaks.GRACE = 0.3\n")
    (folder / "test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), *options]
    env = {name: value for name, value in os.environ.items() if name not in (MARK, "PYTEST_CURRENT_TEST", "RAY_TMPDIR")}
    done = subprocess.run([*command, str(folder)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout


def test_a_clean_session_passes(tmp_path: Path) -> None:
    status, output = session(tmp_path, "def test_one(tmp_path): (tmp_path / 'file').touch()\n")
    assert (status, "left behind" in output) == (0, False), output


@pytest.mark.parametrize(
    "options", [(), pytest.param(("-n", "1"), marks=pytest.mark.slow)], ids=["one process", "xdist"]
)
def test_a_process_that_listens_is_named_with_its_test(tmp_path: Path, options: tuple[str, ...]) -> None:
    test = (
        "import subprocess, sys, pathlib\n"
        "def test_one():\n"
        f"    command = [sys.executable, '-c', {LISTENER!r}]\n"
        "    child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'told').write_text(f'{{child.pid}} {{int(child.stdout.readline())}}')\n"
    )
    status, output = session(tmp_path, test, *options)
    pid, port = (tmp_path / "told").read_text().split()
    os.kill(int(pid), 9)
    assert status == LEFT_BEHIND
    assert f"process {pid}, which listens on {port}: " in output
    assert "(started by test_it.py::test_one)" in output


@pytest.mark.parametrize("wrong", [pytest.param("", marks=pytest.mark.slow), "assert False"])
def test_shared_memory_and_mounts_are_named(tmp_path: Path, wrong: str) -> None:
    if os.geteuid():
        pytest.skip("only root may mount")
    name, place = f"/dev/shm/left-{os.getpid()}", tmp_path / "mounted"
    place.mkdir()
    test = (
        "import subprocess, pathlib\n"
        f"def test_one():\n    pathlib.Path({name!r}).touch()\n"
        f"    subprocess.run(['mount', '-t', 'tmpfs', 'tmpfs', {str(place)!r}], check=True)\n    {wrong}\n"
    )
    try:
        status, output = session(tmp_path, test)
    finally:
        Path(name).unlink(missing_ok=True)
        subprocess.run(["umount", str(place)], check=False)
    assert status == LEFT_BEHIND
    assert f"{name} in shared memory" in output and f"a mount on {place}" in output
