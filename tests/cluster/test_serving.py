"""The two sides of a torchrun job: each ends when the other one dies, and neither trusts the store.

The ranks are started by hand at a store of the test, as torchrun's agent starts them at its own. An agent would end the
other ranks itself, and what they notice would depend on who is faster.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests import forked
from tests.ranks import ENV
from tests.sockets import LOOPBACK, listeners

HEAD = "import os, signal, sys, time, verl\n"


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


class Job:
    """Ranks of one script."""

    def __init__(self, store: Any, file: Path, text: str, ranks: int = 2) -> None:
        file.write_text(HEAD + text)
        env = {
            **ENV,
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        self.processes = [
            forked.Popen(
                [sys.executable, str(file)], env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def end(self) -> list[tuple[int, str, str]]:
        """Exit code, output and errors of each rank; the test's own deadline is there for a hang alone."""
        found = []
        for process in self.processes:
            out, errors = process.communicate(timeout=200)
            found.append((process.returncode, out, errors))
        return found


def test_a_rank_that_waits_for_orders_ends_when_the_driver_dies(store: Any, tmp_path: Path) -> None:
    job = Job(store, tmp_path / "script.py", "verl.Controller().start()\nos.kill(os.getpid(), signal.SIGKILL)\n")
    (code, _, _), (other, _, errors) = job.end()
    assert code == -signal.SIGKILL and other == 1
    assert "ClusterError: rank 1 of 2, host " in errors and "waiting for commands: rank 0, which runs the" in errors


def test_a_rank_that_is_busy_ends_when_the_driver_dies(store: Any, tmp_path: Path) -> None:
    text = (
        "def work():\n"
        "    if os.environ['RANK'] == '0': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    time.sleep(600)\n"
        "verl.everywhere(work)\n"
    )
    _, (code, _, errors) = Job(store, tmp_path / "script.py", text).end()
    assert code == 1 and "in 'work': rank 0, which runs the script, died" in errors


def test_the_driver_names_a_rank_that_dies_in_a_verb(store: Any, tmp_path: Path) -> None:
    text = (
        "def work():\n    if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\nverl.everywhere(work)\n"
    )
    job = Job(store, tmp_path / "script.py", text, ranks=3)
    (code, _, errors), (killed, _, _), (other, _, _) = job.end()
    assert code == 1 and killed == -signal.SIGKILL and other == 0
    assert "ClusterError: rank 1 of 3 (host " in errors and f"pid {job.processes[1].pid}) died in 'work'" in errors


def test_the_driver_is_freed_from_a_collective_whose_other_rank_failed(store: Any, tmp_path: Path) -> None:
    text = (
        "import torch\nimport torch.distributed as dist\n"
        "def meet():\n"
        "    if os.environ['RANK'] == '2': raise ZeroDivisionError('on rank 2')\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "try: verl.everywhere(meet)\n"
        "except ZeroDivisionError as error: print(error, '|', error.__cause__)\n"
        "try: verl.everywhere(meet)\n"
        "except verl.errors.ClusterError as error: print(error)\n"
    )
    (code, out, errors), *others = Job(store, tmp_path / "script.py", text, ranks=3).end()
    assert code == 0, errors
    assert out.startswith("on rank 2 | the worker's own traceback: rank 2 of 3, host ")
    assert "the ranks have been ended: " in out
    assert all(other == 0 for other, _, _ in others)


@pytest.mark.slow
def test_a_rank_that_is_late_in_a_collective_is_named(store: Any, tmp_path: Path) -> None:
    text = (
        "import torch\nimport torch.distributed as dist\n"
        "def meet():\n"
        "    if os.environ['RANK'] == '1': time.sleep(600)\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "verl.Controller(timeout=5).start()\n"
        "verl.everywhere(meet)\n"
    )
    job = Job(store, tmp_path / "script.py", text, ranks=3)
    (code, _, errors), *_ = job.end()
    late = f"pid {job.processes[1].pid})"
    assert code == 1 and "ClusterError: 'meet' did not end within 5 s: waited for rank 1 of 3 (host " in errors
    assert f"{late}; stacks of all ranks are in the log" in errors and f"{late} stands at:" in errors


def test_ranks_end_with_the_script(store: Any, tmp_path: Path) -> None:
    ended = Job(store, tmp_path / "script.py", "verl.Controller().start()\nprint('done')\n").end()
    assert [(code, out) for code, out, _ in ended] == [(0, "done\n"), (0, "")]


def test_ranks_fail_with_the_script(store: Any, tmp_path: Path) -> None:
    ended = Job(store, tmp_path / "script.py", "verl.Controller().start()\nraise ValueError('no')\n").end()
    assert [code for code, _, _ in ended] == [1, 1]
    assert "ValueError: no" in ended[0][2] and not ended[1][2]


def test_a_script_may_destroy_its_process_group(store: Any, tmp_path: Path) -> None:
    text = "import torch.distributed as dist\nverl.Controller().start()\ndist.destroy_process_group()\n"
    assert [code for code, _, _ in Job(store, tmp_path / "script.py", text).end()] == [0, 0]


class Planted:
    """Writes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def test_what_another_process_plants_in_the_store_is_not_executed(store: Any, tiny: Path, tmp_path: Path) -> None:
    """Once the ranks have met, every value that is in the store, or could be looked for there, is a pickle."""
    text = (
        "from pathlib import Path\n"
        f"actor = verl.Actor({str(tiny)!r}, sampling={{'max_new_tokens': 2}})\n"
        "reward = verl.Reward(lambda texts: [1.0, 2.0], whole_batch=True)\n"
        "sequences = actor.generate_sequences(['a', 'b'])\n"
        "actor.compute_log_probs(sequences)\n"
        "print('up', flush=True)\n"
        f"while not Path({str(tmp_path / 'planted')!r}).exists(): time.sleep(0.05)\n"
        "print(actor.update(sequences, reward.get_reward(sequences))['loss'] <= 1e9)\n"
    )
    job = Job(store, tmp_path / "script.py", text)
    assert job.processes[0].stdout is not None
    assert job.processes[0].stdout.readline() == "up\n"
    value = pickle.dumps((Planted(tmp_path / "executed"), None))
    call = hashlib.sha256(b"reward <lambda>: c0.0/0,c0.1/0").digest()[:8].hex()
    for key in store.list_keys():
        store.set(key, value)
        for at, letter in enumerate(key):
            if letter == "/":
                store.set(f"{key[: at + 1]}verl/once/{call}/1", value)
    (tmp_path / "planted").touch()
    (code, out, errors), _ = job.end()
    assert code == 0 and out == "True\n", errors
    assert not (tmp_path / "executed").exists()


def test_a_running_job_listens_on_the_loopback_interface_alone(store: Any, tiny: Path, tmp_path: Path) -> None:
    text = (
        f"actor = verl.Actor({str(tiny)!r}, sampling={{'max_new_tokens': 2}})\n"
        "actor.update(actor.generate_sequences(['a', 'b']), [1.0, 2.0])\n"
        "print('up', flush=True)\nsys.stdin.read()\n"
    )
    job = Job(store, tmp_path / "script.py", text)
    assert job.processes[0].stdout is not None
    assert job.processes[0].stdout.readline() == "up\n"
    found = listeners({process.pid for process in job.processes})
    assert found and found <= LOOPBACK  # those of gloo
