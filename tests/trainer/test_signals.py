import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tests import forked
from verl._base.durable import alive
from verl.trainer.signals import StopSignal

TRAIN = """
    import subprocess, sys, time
    from pathlib import Path
    from verl.trainer.signals import StopSignal
    where = Path(sys.argv[1])
    child = subprocess.Popen(["sleep", "100"])
    (where / "child").write_text(str(child.pid))
    with StopSignal() as stop:
        print("ready", flush=True)
        while not stop.received:
            time.sleep(0.01)
        if sys.argv[2] == "hang":
            print("saving", flush=True)
            time.sleep(60)
        (where / "checkpoint").write_text("saved")
    child.kill()
    sys.exit(128 + stop.received)
"""


def train(where: Path, mode: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", textwrap.dedent(TRAIN), str(where), mode]
    process = forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_lets_the_run_save(tmp_path: Path, number: signal.Signals) -> None:
    process = train(tmp_path, "save")
    process.send_signal(number)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 128 + number
    assert (tmp_path / "checkpoint").read_text() == "saved"
    assert f"{number.name}: finishing this step".encode() in err


def test_second_signal_ends_the_process_and_its_children_at_once(tmp_path: Path) -> None:
    process = train(tmp_path, "hang")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == b"saving\n"
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert time.monotonic() - began < 5
    assert process.returncode == 128 + signal.SIGINT
    assert not (tmp_path / "checkpoint").exists()
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 5
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    # An orphan that nobody reaps stays as a zombie.
    stat = Path(f"/proc/{pid}/stat")
    return alive(pid) and stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in StopSignal.SIGNALS]
    with StopSignal() as stop:
        assert [signal.getsignal(number) for number in StopSignal.SIGNALS] != before
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received is signal.SIGTERM
    assert [signal.getsignal(number) for number in StopSignal.SIGNALS] == before


def test_outside_of_the_main_thread_nothing_is_watched() -> None:
    seen: list[signal.Signals | None] = []

    def work() -> None:
        with StopSignal() as stop:
            seen.append(stop.received)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]
