"""Checkpoints when the process that writes them ends at any moment."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from tests import forked
from tests.trainer.test_checkpoint import IDENTITY, assert_holds, contents, store_with
from verl._base.durable import staging_of
from verl.checkpoint.directory import CheckpointStore
from verl.checkpoint.store import load_checkpoint, save_checkpoint
from verl.checkpoint.verify import verify
from verl.errors import CheckpointError


def process(script: str, path: Path) -> subprocess.Popen[str]:
    """A process that reads and writes lines, and ends with its input."""
    return forked.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


SAVER = """
    import os, sys, torch
    from verl.checkpoint.directory import CheckpointStore
    for line in sys.stdin:
        child = os.fork()
        if child:
            print(child, flush=True)
            os.waitpid(child, 0)
            print("gone", flush=True)
            continue
        store = CheckpointStore(sys.argv[1], keep=2)
        first = store.load()
        value = first.json("trainer.json")["value"] if first else 0
        while True:
            value += 1
            tensors = {f"w{i}": torch.full((50_000,), float(value)) for i in range(4)}
            files = {"actor/weights": tensors, "trainer.json": {"value": value}}
            assert store.begin(value % 7 + 1, files, {"model": "tiny"}).wait()
"""


def test_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    rng = random.Random(7)
    half_done = 0
    with process(SAVER, tmp_path) as saver:
        for trial in range(24):
            saver.stdin.write("next\n")
            child = int(saver.stdout.readline())
            deadline = time.monotonic() + 20
            while trial == 0 and not (tmp_path / "latest").is_symlink() and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.15 * rng.random())
            os.kill(child, signal.SIGKILL)
            assert saver.stdout.readline() == "gone\n"
            half_done += any(p.name.startswith(".") for p in tmp_path.iterdir())
            assert_whole(CheckpointStore(tmp_path, keep=2))
            assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert half_done >= 3, "too few trials hit a save half done: the test shows nothing"


def assert_whole(store: CheckpointStore) -> None:
    found = store.load(identity={"model": "tiny"})
    assert found is not None
    assert found.step == store.steps()[-1]
    value = found.json("trainer.json")["value"]
    assert all(torch.equal(t, torch.full((50_000,), float(value))) for t in found.tensors("actor/weights").values())
    assert all(verify(store.path(step)).ok for step in store.steps())


CRASHER = """
    import os, sys, torch
    from verl.checkpoint.directory import CheckpointStore
    EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "shutil.copyfile")
    def save(step, value):
        tensors = {f"w{i}": torch.full((50_000,), float(value)) for i in range(4)}
        files = {"actor/weights": tensors, "trainer.json": {"value": value}}
        assert CheckpointStore(sys.argv[1], keep=1).begin(step, files, {"model": "tiny"}).wait()
    save(1, 1)
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        left = [int(line)]
        def crash(event, arguments):
            if event in EVENTS and sys.argv[1] in str(arguments):
                left[0] -= 1
                if left[0] == 0:
                    os._exit(9)
        sys.addaudithook(crash)
        found = CheckpointStore(sys.argv[1], keep=1).load()
        save(found.step, found.step + 1)
        save(found.step + 1, found.step + 2)
        os._exit(0)
"""


@pytest.mark.slow
def test_crash_before_each_single_file_operation_of_a_save(tmp_path: Path) -> None:
    """Ends the process before the k-th operation on the store's files, for every k, over a replacement of a checkpoint
    and a new one that drives out the old."""
    codes = []
    with process(CRASHER, tmp_path) as saver:
        assert saver.stdout.readline() == "ready\n"
        while not codes or codes[-1]:
            saver.stdin.write(f"{len(codes) + 1}\n")
            codes.append(int(saver.stdout.readline()))
            assert_whole(CheckpointStore(tmp_path, keep=2))
            assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert len(codes) > 40
    assert set(codes) == {0, 9}


def test_rollback_removes_what_came_after(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3, 4)
    (store.path(4) / "trainer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 9 to go back to; it has \[1, 2, 3, 4\]"):
        store.rollback(9)
    assert store.steps() == [1, 2, 3, 4]
    store.rollback(2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000001", "step-000002"]
    assert os.readlink(tmp_path / "latest") == "step-000002"
    assert_holds(store.load(identity=IDENTITY), 2)
    store.rollback(2)
    assert store.steps() == [1, 2]


ROLLER = """
    import os, sys, torch
    from verl.checkpoint.directory import CheckpointStore
    EVENTS = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink")
    for line in sys.stdin:
        child = os.fork()
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        left = [int(line)]
        store = CheckpointStore(sys.argv[1], keep=9)
        for step in range(1, 5):
            tensors = {f"w{i}": torch.full((50_000,), float(step)) for i in range(4)}
            files = {"actor/weights": tensors, "trainer.json": {"value": step}}
            assert store.begin(step, files, {"model": "tiny"}).wait()
        def crash(event, arguments):
            if event in EVENTS and sys.argv[1] in str(arguments):
                left[0] -= 1
                if left[0] == 0:
                    os._exit(9)
        sys.addaudithook(crash)
        store.rollback(1)
        os._exit(0)
"""


@pytest.mark.slow
def test_crash_before_each_file_operation_of_a_rollback(tmp_path: Path) -> None:
    codes, lasts = [], []
    with process(ROLLER, tmp_path) as roller:
        while not codes or codes[-1]:
            roller.stdin.write(f"{len(codes) + 1}\n")
            codes.append(int(roller.stdout.readline()))
            store = CheckpointStore(tmp_path, keep=9)
            assert_whole(store)
            lasts.append(store.steps()[-1])
            assert store.steps() == list(range(1, lasts[-1] + 1))
            assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert lasts == sorted(lasts, reverse=True)
    assert set(lasts) == {1, 2, 3, 4}
    assert set(codes) == {0, 9}


def test_half_a_replacement_is_undone(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "mine", 3, contents(3))
    (tmp_path / "mine").rename(tmp_path / f".replaced-elsewhere~{2**22 + 5}~~mine")
    assert_holds(load_checkpoint(tmp_path / "mine"), 3)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_staging_is_deleted_only_when_its_process_has_ended_on_this_host(tmp_path: Path) -> None:
    """Not of a living process, and not of one on another host, whose pid says nothing here."""
    script = "from verl._base.durable import *; print(staging_of(Path('step-000001')), flush=True); input()"
    with process(script, tmp_path) as other:
        living = other.stdout.readline().strip()
        host, pid, started, _ = living.removeprefix(".staging-").split("~")
        names = {
            "living": living,
            "own": staging_of(Path("step-000001")).name,
            "ended": f".staging-{host}~{2**22 + 5}~{started}~step-000001",
            "earlier process with this pid": f".staging-{host}~{pid}~00000000~step-000001",
            "another host": f".staging-elsewhere~{2**22 + 5}~{started}~step-000001",
        }
        for name in names.values():
            (tmp_path / name).mkdir()
        CheckpointStore(tmp_path).begin(1, {"trainer.json": {}}).wait()
        left = {kind for kind, name in names.items() if (tmp_path / name).exists()}
        assert left == {"living", "another host"}
        other.stdin.write("\n")
    CheckpointStore(tmp_path)
    assert not (tmp_path / living).exists()
