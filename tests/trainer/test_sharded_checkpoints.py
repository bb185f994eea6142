"""Checkpoints that several ranks write and read, each its own pieces, at any layout."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import verl
from tests.ranks import ENV, command, job
from tests.trainer.rank_checkpoints import LAYOUTS, MODELS, engine
from tests.trainer.runs import assert_same_run, run_dir, settings
from tests.trainer.test_ranks import ranks_of, start
from tests.trainer.test_state import low_bytes
from tests.training.cases import ROWS, part, ragged_batch
from verl.checkpoint.directory import CheckpointStore
from verl.checkpoint.store import load_checkpoint
from verl.checkpoint.verify import verify
from verl.errors import CheckpointError
from verl.weights.shard import Shard, checksum
from verl.weights.tensor_files import read_shards
from verl.workers.saving import RankFiles

JOB = Path(__file__).with_name("rank_checkpoints.py")
PARTS = ("weights", "optimizer")
ORDER = ["fsdp4", "pp2", "tp2", "one", "fsdp2 x tp2", "ddp4", "fsdp2 x pp2", "hsdp4"]


def elements(folder: Path, stem: str) -> int:
    count = 0
    for path in folder.glob(f"{stem}-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            count += sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118 - not a dictionary
    return count


@pytest.mark.quick("three")
@pytest.mark.parametrize("order", [ORDER[:3], ORDER], ids=["three", "all"])
def test_a_checkpoint_of_any_layout_goes_on_at_any_other_with_the_same_losses(tmp_path: Path, order: list[str]) -> None:
    found = [json.loads(line) for line in job(4, JOB, tmp_path, *order).stdout.splitlines()]
    assert [run["kind"] for run in found] == [*MODELS]
    for run in found:
        one = engine(run["kind"], LAYOUTS["one"], None)
        in_half = run["kind"].endswith("bf16")
        for number, step in enumerate(run["steps"]):
            expected, where = one.update([part(ragged_batch(ROWS))]), (run["kind"], step["layout"])
            close = partial(pytest.approx, rel=0.05) if in_half else partial(pytest.approx, abs=1e-9)
            assert step["loss"] == close(expected["loss"]), where
            assert step["norm"] == close(expected["grad_norm"]), where
            # Each piece is there once, and the ranks share the writing.
            folder = tmp_path / f"{run['kind']}-{number}"
            assert elements(folder, "weights") == sum(p.numel() for p in one.model.parameters())
            assert min(step["bytes"]) > 0.5 * max(step["bytes"])
            # One tensor beside the rank's own pieces (a master is put together in fp32), and a few numbers.
            largest = (4 if in_half else 8) * max(p.numel() for p in one.model.parameters())
            assert max(step["memory"]) <= largest + 256, where


def test_what_is_written_in_the_background_is_of_the_moment_of_the_save(tmp_path: Path) -> None:
    live = torch.zeros(4 << 20)
    files = RankFiles(tmp_path, {"weights": [Shard.whole("w", live)]}, None, background=True)
    live.fill_(1.0)  # training goes on
    assert files.gathered(wait=True) is not None
    (shard,) = read_shards(tmp_path.iterdir())
    assert not shard.tensor.any()


def test_checkpoints_in_the_background_are_those_of_the_foreground(tiny: Path, tmp_path: Path) -> None:
    found = {}
    for in_background in (False, True):
        folder = tmp_path / str(in_background)
        actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling={"max_new_tokens": 6})
        options = {"checkpoint_dir": folder, "save_every": 1, "async_save": in_background}
        trainer = verl.Trainer(actor, reward=low_bytes, algorithm="grpo", n=2, log_dir=False, **options)
        trainer.fit([["Once", "In"]] * 3, 3)
        store = CheckpointStore(folder)
        assert store.steps() == [1, 2, 3] and all(verify(store.path(step)).ok for step in store.steps())
        parts = [load_checkpoint(store.path(step)).shards(f"actor/{part}") for step in (1, 2, 3) for part in PARTS]
        found[in_background] = [checksum(part) for part in parts]
    assert found[True] == found[False]
    assert len(set(found[True])) == 6


def test_a_failure_in_the_background_is_reported_and_training_goes_on(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling={"max_new_tokens": 6})
    options = {"checkpoint_dir": tmp_path, "save_every": 1, "async_save": True}
    trainer = verl.Trainer(actor, reward=low_bytes, algorithm="grpo", n=2, log_dir=False, **options)
    trainer.step(["Once", "In"])
    trainer.checkpoints.finish()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"step-000003 was not saved: .* larger than .* trained but not saved"
        ):
            trainer.fit([["Once", "In"]] * 2, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "step-000002 was not saved" in caplog.text and "training goes on" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000001"]
    trainer.fit([["Once", "In"]], 1)
    assert CheckpointStore(tmp_path).steps() == [1, 4]


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True])
def test_a_rank_or_the_driver_that_is_killed_while_saving_costs_no_checkpoint(
    tmp_path: Path, tiny: Path, in_background: bool
) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    changes = {"actor_rollout_ref.actor.strategy": "fsdp", "trainer.total_steps": 12, "trainer.save_every": 1}
    changes |= {"data.eval": None, "trainer.eval_every": None, "trainer.async_save": in_background}
    job(2, *start(tmp_path / "whole.yaml", settings(tmp_path / "whole", tiny, **changes)))
    line = command(2, *start(tmp_path / "cut.yaml", settings(tmp_path / "cut", tiny, **changes)))
    directory = tmp_path / "cut" / "runs" / "latest" / "checkpoints"
    for rank in (1, 0):
        before = CheckpointStore(directory).steps() if directory.is_dir() else []
        process = subprocess.Popen(line, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        # Once a further checkpoint is there, in the midst of the next one.
        while process.poll() is None and not half_saved(directory, after=len(before)):
            time.sleep(0.0005)
        os.kill(ranks_of(process.pid)[rank], signal.SIGKILL)
        process.communicate(timeout=120)
        assert process.returncode != 0
        store = CheckpointStore(directory)
        newest = store.load()
        assert newest is not None and all(verify(store.path(step)).ok for step in store.steps())
        assert not [path for path in directory.iterdir() if path.name.startswith(".")]
    job(2, *line[line.index("-m", 3) :])
    assert_same_run(run_dir(tmp_path / "whole"), run_dir(tmp_path / "cut"))


def half_saved(directory: Path, after: int) -> bool:
    """Whether a rank is writing, when at least `after` checkpoints are whole."""
    if not directory.is_dir() or len(list(directory.glob("step-*"))) <= min(after, 1):
        return False
    return any(directory.glob(".staging-*/actor/weights-*"))
