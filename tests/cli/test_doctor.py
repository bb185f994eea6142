"""The doctor finds what is wrong, and nothing where nothing is."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import verl
from tests import forked
from verl.cli.doctor import (
    EXTRAS,
    Finding,
    check_collective,
    check_host,
    check_kernels,
    check_packages,
    check_shared_memory,
)


@pytest.mark.slow
def test_two_ranks_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    found = check_collective(timeout=120)
    assert found.state == "ok" and "gloo, 2 ranks" in found.detail


def test_a_dead_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    before = children()

    def kill_one() -> None:
        while len(started := children() - before) < 2:
            time.sleep(0.01)
        os.kill(max(started), signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    found = check_collective(timeout=120)
    killer.join()
    assert found.state == "fail" and "rank 1 of 2" in found.detail and "killed by signal 9" in found.detail
    assert children() == before  # the other one does not go on waiting


def test_an_unknown_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    monkeypatch.setattr("verl.cli.doctor.subprocess.Popen", forked.Popen)
    found = check_collective(timeout=120)
    assert found.state == "fail" and "nope0" in found.detail and "this machine has" in found.advice


def test_an_address_that_does_not_resolve_ends_by_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    found = check_host()
    assert found.state == "fail" and "no.such.host.invalid" in found.detail and "MASTER_ADDR" in found.advice
    began = time.monotonic()
    found = check_collective(timeout=2)
    assert time.monotonic() - began < 10
    assert found.state == "fail" and "no.such.host.invalid" in found.detail


def test_an_extra_that_cannot_be_imported_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlflow-9.9.dist-info").mkdir()
    (tmp_path / "mlflow-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mlflow\nVersion: 9.9\n")
    (tmp_path / "mlflow.py").write_text("raise ImportError('libmissing.so.1: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("verl.cli.doctor.EXTRAS", {"mlflow": ("mlflow", "mlflow"), "none": ("no-such-part", "no")})
    parts, broken, missing = check_packages()
    assert parts.state == "ok" and f"torch {torch.__version__}" in parts.detail
    assert broken.state == "fail" and "mlflow 9.9" in broken.detail and "libmissing.so.1" in broken.detail
    assert "verl-hybrid[mlflow]" in broken.advice
    assert missing == Finding("extras", "ok", "not installed: none (pip install 'verl-hybrid[none]', and so on)")


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_kernels().state == "ok"
    monkeypatch.setattr("verl.kernels.build.find_compiler", lambda: None)
    found = check_kernels()
    assert found.state == "warn" and "no C++ compiler" in found.detail and "build-essential" in found.advice


def test_every_extra_is_looked_for() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    section = project.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    assert set(EXTRAS) == set(re.findall(r"^([\w-]+) = ", section, re.MULTILINE)) - {"dev"}


def test_shared_memory_without_room_is_a_fault(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    found = check_shared_memory(tmp_path, need=free + (1 << 30))
    assert found.state == "fail" and str(tmp_path) in found.detail and "--shm-size" in found.advice
    assert check_shared_memory(tmp_path, need=1 << 20).state == "ok"
    assert not list(tmp_path.iterdir())


def test_a_full_dev_shm_fails_the_command() -> None:
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("user namespaces with mounts are not allowed here")
    code = "from verl.cli.doctor import check_shared_memory as c; f = c(); print(f.state, f.detail)"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$0" -c "{code}"', sys.executable],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.startswith("fail 64 MiB cannot be had in /dev/shm: No space left"), done


def children() -> set[int]:
    """Processes that this one has started and that have not been waited for."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


def site_with_both(folder: Path, replaced: str | None) -> Path:
    """A folder of installed packages with this one and a distribution `verl`, which has replaced a file of ours."""
    package = Path(verl.__file__).parent
    (folder / "verl").mkdir()
    for entry in package.iterdir():
        if entry.is_dir() and entry.name != "utils":
            (folder / "verl" / entry.name).symlink_to(entry)
        elif entry.is_file():
            shutil.copy(entry, folder / "verl")
    shutil.copytree(package / "utils", folder / "verl" / "utils", ignore=shutil.ignore_patterns("__pycache__"))
    ours = ["verl/__init__.py", "verl/utils/__init__.py", "verl/_base/__init__.py", "verl/_base/installed.py"]
    lines = []
    for name in ours:
        digest = base64.urlsafe_b64encode(hashlib.sha256((folder / name).read_bytes()).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},1\n")
    (folder / "verl_hybrid-0.1.0.dist-info").mkdir()
    (folder / "verl_hybrid-0.1.0.dist-info" / "RECORD").write_text("".join(lines))
    (folder / "verl_hybrid-0.1.0.dist-info" / "METADATA").write_text("Name: verl-hybrid\nVersion: 0.1.0\n")
    (folder / "verl-0.6.1.dist-info").mkdir()
    (folder / "verl-0.6.1.dist-info" / "METADATA").write_text("Name: verl\nVersion: 0.6.1\n")
    (folder / "verl-0.6.1.dist-info" / "RECORD").write_text(
        "verl/__init__.py,,\nverl/utils/__init__.py,,\nverl/o.py,,\n"
    )
    if replaced is not None:
        (folder / replaced).write_text("# theirs\n")
    return folder


@pytest.mark.parametrize("replaced", [None, "verl/utils/__init__.py"])
def test_the_other_distribution_of_this_name_is_named(tmp_path: Path, replaced: str | None) -> None:
    site = site_with_both(tmp_path, replaced)
    code = (
        "import verl\nfrom verl.cli.doctor import check_packages\n"
        "_, finding, *_ = check_packages()\nprint(finding.state, finding.detail, finding.advice)"
    )
    env = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    what = "it has replaced verl/utils/__init__.py" if replaced else "and 2 of our paths, ours so far"
    for said in (done.stdout, done.stderr):  # of the doctor, and of the import
        assert f"verl 0.6.1 (volcengine's) is installed in {site}" in said and what in said
        assert "pip uninstall -y verl verl-hybrid" in said
    assert "RuntimeWarning" in done.stderr and done.stdout.startswith("fail" if replaced else "warn")
    assert "other verl" not in [finding.check for finding in check_packages()]  # here
