from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests import forked
from tests.properties import examples
from verl._base.durable import staging_of
from verl.batch import Batch
from verl.data.buffers import Buffer, DiskBuffer, MemoryBuffer, make_buffer
from verl.errors import ConfigError, DataError


def samples(start: int, count: int) -> Batch:
    rows = [
        {"id": str(i), "response_tokens": [i] * (i % 4), "reward": None if i % 3 else float(i), "note": {"n": i}}
        for i in range(start, start + count)
    ]
    return Batch.from_rows(rows)


@pytest.fixture(params=["memory", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], Buffer]:
    return lambda capacity: make_buffer(request.param, capacity, tmp_path / "buffer")


def test_what_goes_in_comes_out_in_order(make: Callable[[int], Buffer]) -> None:
    buffer = make(10)
    assert isinstance(buffer, Buffer)
    buffer.add(samples(0, 3))
    buffer.add(samples(3, 4))
    assert (len(buffer), buffer.room) == (7, 3)
    assert list(buffer.drain().rows()) == list(samples(0, 7).rows())
    buffer.add(samples(7, 2))
    assert list(buffer.drain().rows()) == list(samples(7, 2).rows())
    assert len(buffer.drain()) == len(buffer) == 0


def test_a_full_buffer_takes_all_or_nothing(make: Callable[[int], Buffer]) -> None:
    buffer = make(4)
    buffer.add(samples(0, 3))
    with pytest.raises(DataError, match="3 of 4 places are taken"):
        buffer.add(samples(3, 2))
    assert buffer.drain()["id"] == ["0", "1", "2"]


def test_state_goes_through_a_checkpoint(make: Callable[[int], Buffer]) -> None:
    buffer = make(20)
    buffer.add(samples(0, 2))
    buffer.drain()
    buffer.add(samples(2, 4))
    state = Batch.from_ipc(buffer.state().to_ipc())
    buffer.drain()
    buffer.add(samples(6, 5))
    buffer.load_state(state)
    assert buffer.drain()["id"] == ["2", "3", "4", "5"]
    buffer.add(samples(0, 1))
    buffer.load_state(samples(0, 0))
    assert len(buffer) == 0


steps = st.lists(st.tuples(st.sampled_from(["add", "drain", "reopen", "state"]), st.integers(0, 5)), max_size=40)


@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps)
def test_no_sample_is_lost_or_given_twice(
    steps: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("buffer")
    memory, disk = MemoryBuffer(12), DiskBuffer(path, 12)
    waiting: list[str] = []
    given_out: list[str] = []
    number = 0
    for action, count in steps:
        if action == "add" and len(waiting) + count <= 12:
            memory.add(samples(number, count))
            disk.add(samples(number, count))
            waiting += [str(i) for i in range(number, number + count)]
            number += count
        elif action == "drain":
            out = disk.drain()
            assert out == memory.drain()
            ids = out["id"] if len(out) else []
            assert ids == waiting
            waiting, given_out = [], given_out + ids
        elif action == "reopen":
            disk.close()
            disk = DiskBuffer(path, 12)
        assert len(memory) == len(disk) == len(waiting)
        assert (disk.state()["id"] if waiting else []) == waiting
    assert given_out + waiting == [str(i) for i in range(number)]
    disk.close()


def test_a_torn_segment_is_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    buffer = DiskBuffer(tmp_path, 100)
    for start in (0, 10, 20):
        buffer.add(samples(start, 10))
    buffer.close()
    torn = sorted(tmp_path.glob("*.parquet"))[1]
    torn.write_bytes(torn.read_bytes()[:-40])
    staging = staging_of(tmp_path / "000000000009.parquet")
    staging.write_bytes(b"half")
    buffer = DiskBuffer(tmp_path, 100)
    assert "segment skipped" in caplog.text
    assert torn.name in caplog.text
    assert len(buffer) == 20
    buffer.add(samples(30, 1))
    assert buffer.drain()["id"] == [str(i) for i in (*range(10), *range(20, 31))]
    assert torn.exists()
    assert not staging.exists()


CURSORS = "[] {} 1 9e99 %s {'segment':true} {'segment':-1} {'segment':'1'} {'segment':0.5}"


@pytest.mark.parametrize("raw", [text.replace("'", '"').encode() for text in (CURSORS % ("[" * 200_000)).split()])
def test_a_malformed_cursor_is_damage(tmp_path: Path, raw: bytes) -> None:
    buffer = DiskBuffer(tmp_path, 5)
    buffer.add(samples(0, 3))
    buffer.drain()
    buffer.close()
    (tmp_path / "cursor.json").write_bytes(raw)
    with pytest.raises(DataError, match=r"cursor\.json is damaged: .*Remove the directory"):
        DiskBuffer(tmp_path, 5)


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    first = DiskBuffer(tmp_path, 5)
    with pytest.raises(DataError, match="open already, in another process or in this one"):
        DiskBuffer(tmp_path, 5)
    first.close()
    DiskBuffer(tmp_path, 5).close()
    with pytest.raises(DataError, match="has been closed"):
        first.add(samples(0, 1))


def test_a_fork_does_not_hold_the_lock(tmp_path: Path) -> None:
    """A reward's process may outlive the run for a moment, in which the run is begun again."""
    first = DiskBuffer(tmp_path, 5)
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        theirs.send(b"x")
        theirs.recv(1)  # until the parent lets it go
        os._exit(0)
    theirs.close()
    ours.recv(1)
    with pytest.raises(DataError, match="open already"):
        DiskBuffer(tmp_path, 5)
    first.close()
    DiskBuffer(tmp_path, 5).close()
    ours.close()
    assert os.waitpid(child, 0)[1] == 0


def test_a_buffer_that_is_gone_leaves_its_directory_to_the_next(tmp_path: Path) -> None:
    DiskBuffer(tmp_path, 5).add(samples(0, 2))
    assert len(DiskBuffer(tmp_path, 5)) == 2


def test_a_write_that_fails_leaves_the_buffer_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = DiskBuffer(tmp_path, 50)
    buffer.add(samples(0, 3))

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        buffer.add(samples(3, 3))
    with pytest.raises(OSError, match="No space"):
        buffer.drain()
    monkeypatch.undo()
    assert buffer.drain()["id"] == ["0", "1", "2"]
    buffer.close()


WRITER = """
import sys
from verl.batch import Batch
from verl.data.buffers import DiskBuffer

buffer, number = DiskBuffer(sys.argv[1], 10**6), 0
while True:
    buffer.add(Batch.from_rows([{"id": str(i), "text": "x" * 500} for i in range(number, number + 7)]))
    number += 7
    print(f"added {number}", flush=True)
    if number % 21 == 0:
        out = buffer.drain()["id"]
        print(f"drained {int(out[-1]) + 1}", flush=True)
"""


@pytest.mark.parametrize("attempt", range(3))
def test_kill_at_any_moment(tmp_path: Path, attempt: int) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    process = forked.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    time.sleep(0.11 + 0.07 * attempt)
    process.send_signal(signal.SIGKILL)
    lines += process.stdout.read().splitlines()
    process.wait(timeout=10)
    told = {"added": 0, "drained": 0}
    for line in lines:
        word, number = line.split()
        told[word] = int(number)
    buffer = DiskBuffer(tmp_path, 10**6)
    waiting = buffer.drain()
    ids = [int(name) for name in waiting["id"]] if len(waiting) else []
    # One call may have been under way: it happened as a whole or not at all.
    first, end = (ids[0], ids[-1] + 1) if ids else (told["added"], told["added"])
    assert ids == list(range(first, end))
    assert first in (told["drained"], told["drained"] + 21)
    assert end in (told["added"], told["added"] + 7)
    buffer.close()


def test_names_of_buffers(tmp_path: Path) -> None:
    own = MemoryBuffer(3)
    assert make_buffer(own, 5) is own
    with pytest.raises(ConfigError, match="did you mean 'memory'"):
        make_buffer("memry", 5)
    with pytest.raises(ConfigError, match="needs a directory"):
        make_buffer("disk", 5)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"the buffer cannot lie in .*file"):
        make_buffer("disk", 5, tmp_path / "file")
    with pytest.raises(ConfigError, match=r"MemoryBuffer\.capacity: must be at least 1, not 0"):
        make_buffer("memory", 0)
