"""Tools for looking into a run: memory by role, time by collective, ranks that differ, stacks of a hung process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import verl
from tests import forked, ranks
from verl.utils.debugging import check_same
from verl.utils.memory import memory_by_role


def test_memory_is_told_by_role(tiny: Path) -> None:
    actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling=verl.SamplingParams(max_new_tokens=4, ignore_eos=True))
    trainer = verl.PPOTrainer(actor, reward_fn=lambda texts: [1.0] * len(texts), log_dir=False, n=2)
    trainer.step(["one"])
    found = memory_by_role({"actor": actor, "critic": trainer.critic, "again": actor})
    weights = sum(parameter.nbytes for parameter in actor.model.parameters())
    assert found["actor"]["weights"] >= weights
    assert weights <= found["actor"]["weights"] < 3 * weights  # the actor's, and its frozen reference
    others = sum(size for kind, size in found["actor"].items() if kind != "weights")
    assert others >= 2 * weights  # two moments at least
    assert found["critic"]["weights"] >= weights
    assert found["again"] == {}  # nothing is counted twice


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_memory_of_ranks_is_that_of_their_parts(tiny: Path, tmp_path: Path, strategy: str) -> None:
    ranks.job(2, Path(__file__).with_name("rank_memory.py"), tiny, tmp_path / "found.json", strategy)
    before, after = json.loads((tmp_path / "found.json").read_text())
    weights = 107_680  # bytes of the model
    assert before["actor"]["weights"] < 100  # shapes alone: its weights are read by the workers
    part = weights / 2 if strategy == "fsdp" else weights
    assert part <= after["actor"]["weights"] < 1.1 * part
    assert 2 * part <= after["actor"]["AdamW"] < 2.1 * part
    assert after["trainer"] == {}


def test_collectives_are_timed_and_ranks_that_differ_are_named(tmp_path: Path) -> None:
    ranks.job(2, Path(__file__).with_name("rank_times.py"), tmp_path / "told")
    said = [json.loads(Path(f"{tmp_path / 'told'}-{rank}").read_text()) for rank in range(2)]
    for times, difference in said:
        assert set(times) == {"gloo:all_reduce", "gloo:broadcast"}
        calls, _, elements = times["gloo:all_reduce"]
        assert (calls, elements) == (3, 3 * 1000)
        assert difference == "'weights' is not the same on all ranks: ranks [0] / ranks [1]"
    # rank 1 came 1.5 s late to the first one, which rank 0 shows
    assert said[0][0]["gloo:all_reduce"][1] > 0.4 > 0.2 > said[1][0]["gloo:all_reduce"][1] - 0.2


def test_a_process_alone_is_the_same() -> None:
    check_same("weights", torch.arange(5))


def test_a_hung_process_shows_its_stacks_when_asked(tmp_path: Path) -> None:
    code = (
        "import sys, time; from verl.utils.debugging import dump_stacks_on_signal as d; d(sys.argv[1])\n"
        "def stuck_here():\n    print('ready', flush=True)\n    time.sleep(600)\n"
        "stuck_here()"
    )
    file = tmp_path / "stacks"
    process = forked.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGUSR1)
        until = time.monotonic() + 30
        while "stuck_here" not in file.read_text() and time.monotonic() < until:
            time.sleep(0.05)
        assert "stuck_here" in file.read_text()
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
