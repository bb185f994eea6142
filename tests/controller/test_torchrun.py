"""One script in one process and under torchrun: the same parameters, metrics and samples."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks
from tests.ranks import torchrun
from verl.data.buffers import DiskBuffer

SCRIPT = Path(__file__).with_name("three_steps.py")
CLOCK = ("busy/",)


def outcome(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return torch.load(folder / "weights.pt"), json.loads((folder / "run.json").read_text())


def assert_equal_runs(one: Path, other: Path) -> None:
    (weights, run), (weights_, run_) = outcome(one), outcome(other)
    assert weights.keys() == weights_.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weights_[name], weight, rtol=0, atol=1e-9, msg=name)
    for ours, theirs in zip(run["samples"], run_["samples"], strict=True):
        for column in ("id", "response_tokens", "reward"):
            assert theirs[column] == ours[column]
        for a, b in zip(ours["rollout_log_probs"], theirs["rollout_log_probs"], strict=True):
            assert b == pytest.approx(a, abs=1e-9)
    for record, record_ in zip(run["records"], run_["records"], strict=True):
        assert record.keys() == record_.keys()
        for name, value in record.items():
            if not name.startswith(CLOCK) and not (isinstance(value, float) and math.isnan(value)):
                assert record_[name] == pytest.approx(value, abs=1e-9), name


@pytest.fixture(scope="module")
def alone(make_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model, and what one process made of it."""
    model, out = make_tiny("gpt2", torch.float64), tmp_path_factory.mktemp("alone")
    ranks.alone(SCRIPT, model, out)
    return model, out


def test_two_ranks_equal_one_process(alone: tuple[Path, Path], tmp_path: Path) -> None:
    model, expected = alone
    torchrun(2, SCRIPT, model, tmp_path)
    assert_equal_runs(expected, tmp_path)


def test_two_ranks_with_a_part_of_the_models_each_equal_one_process(alone: tuple[Path, Path], tmp_path: Path) -> None:
    model, expected = alone
    torchrun(2, SCRIPT, model, tmp_path, "null", json.dumps("fsdp"))
    assert_equal_runs(expected, tmp_path)


@pytest.mark.slow
def test_one_optimizer_step_a_batch_with_a_part_of_the_models_each_equals_one_process(
    alone: tuple[Path, Path], tmp_path: Path
) -> None:
    # The log-probs before the update are then those of the rollout.
    (tmp_path / "one").mkdir()
    ranks.alone(SCRIPT, alone[0], tmp_path / "one", "null", "null", "null")
    torchrun(2, SCRIPT, alone[0], tmp_path, "null", json.dumps("fsdp"), "null")
    assert_equal_runs(tmp_path / "one", tmp_path)


@pytest.mark.slow
def test_one_rank_rolls_out_and_one_trains(alone: tuple[Path, Path], tmp_path: Path) -> None:
    model, expected = alone
    placement = {"rollout": "cpu:0", "actor": "cpu:1", "critic": "cpu:1", "reference": "cpu:0"}
    torchrun(2, SCRIPT, model, tmp_path, json.dumps(placement))
    assert_equal_runs(expected, tmp_path)


def test_copies_of_the_actor_have_its_weights_where_it_does_not_stand(
    make_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import dataclasses, sys, torch, verl\n"
        "placement = {'actor': 'cpu:0', 'critic': 'cpu:1', 'reference': 'cpu:1'}\n"
        "sampling = verl.SamplingParams(max_new_tokens=4)\n"
        "actor = verl.Actor(sys.argv[1], dtype='float64', placement=placement, sampling=sampling)\n"
        "actor.load_shards([dataclasses.replace(s, tensor=s.tensor * 1.1) for s in actor.shards()])\n"
        "sequences = actor.generate_sequences(['a', 'b'])\n"
        "own, of_copy = actor.compute_log_probs(sequences), actor.compute_ref_log_probs(sequences)\n"
        "torch.testing.assert_close(own.tensor('log_probs'), of_copy.tensor('ref_log_probs'), rtol=0, atol=1e-9)\n"
        "critic = verl.Updater('ppo', actor=actor, kl_in='none').critics['critic']\n"
        "weights, copies = ({s.name: s.tensor.clone() for s in each.shards()} for each in (actor, critic))\n"
        "shared = [name for name in copies if name in weights]\n"
        "assert len(shared) > 10, (list(weights), list(copies))\n"
        "assert all(torch.equal(weights[name], copies[name]) for name in shared)\n"
    )
    torchrun(2, script, make_tiny("gpt2", torch.float64))


def test_a_disk_buffer_is_shared_by_the_ranks(tiny: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, verl\n"
        "actor = verl.Actor(sys.argv[1], sampling={'max_new_tokens': 4})\n"
        "trainer = verl.Trainer(actor, reward_fn=lambda texts: [1.0] * len(texts), n=2, log_dir=False,\n"
        "                       buffer='disk', buffer_dir=sys.argv[2], update_freq=8, buffer_size=8)\n"
        "updated = [trainer.step(['a', 'b'])['updated'] for _ in range(3)]\n"
        "assert updated == [False, True, False], updated\n"
        "assert len(trainer.buffer) == 4 and trainer.buffer.room == 4\n"
    )
    torchrun(2, script, tiny, tmp_path / "buffer")
    assert len(DiskBuffer(tmp_path / "buffer", 8)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_rewards_run_once_and_checkpoints_move_between_rank_counts(tiny: Path, tmp_path: Path, strategy: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys, pathlib, verl\n"
        "model, out, mode, strategy = sys.argv[1:]\n"
        "def reward(responses):\n"
        "    with open(f'{out}/calls', 'a') as file: file.write(os.environ.get('RANK', '-'))\n"
        "    return [float(len(r)) for r in responses]\n"
        "sampling = verl.SamplingParams(max_new_tokens=6)\n"
        "actor = verl.Actor(model, strategy=strategy, optim={'lr': 1e-2}, sampling=sampling)\n"
        "trainer = verl.Trainer(actor, reward_fn=reward, n=2, log_dir=False)\n"
        "if mode == 'save':\n"
        "    trainer.step(['a', 'b', 'c'])\n"
        "    trainer.save_checkpoint(f'{out}/checkpoint')\n"
        "else:\n"
        "    trainer.load_checkpoint(f'{out}/checkpoint')\n"
        "records = [] if mode == 'load' else [trainer.step(['d', 'e', 'f'])]\n"
        "if mode == 'alone': trainer.save_checkpoint(f'{out}/checkpoint')\n"
        "records += [trainer.step(['g', 'h', 'i'])]\n"
        "if verl.is_main():\n"
        "    found = [(record['reward'], record['loss/actor'], record['grad_norm/actor']) for record in records]\n"
        "    pathlib.Path(f'{out}/{mode}.json').write_text(json.dumps(found))\n"
    )
    torchrun(2, script, tiny, tmp_path, "save", strategy)
    assert set((tmp_path / "calls").read_text()) == {"0"}
    ranks.alone(script, tiny, tmp_path, "alone", strategy)
    torchrun(2, script, tiny, tmp_path, "load", strategy)
    saved, one, two = (json.loads((tmp_path / f"{mode}.json").read_text()) for mode in ("save", "alone", "load"))
    for ours, theirs in ((saved[0], one[0]), (saved[1], one[1]), (one[1], two[0])):
        assert theirs == pytest.approx(ours, abs=1e-5)


def with_loss_of_rank_1(path: Path, does: str, **options: float) -> Path:
    """A script that makes one step, in which rank 1 does something else first."""
    path.write_text(
        "import os, sys, time, verl\n"
        "class Own(verl.BaseAlgorithm):\n"
        "    def compute_loss(self, x):\n"
        f"        if os.environ['RANK'] == '1': {does}\n"
        "        return verl.Loss(total=(x.weights * x.log_probs).sum())\n"
        "actor = verl.Actor(sys.argv[1], sampling=verl.SamplingParams(max_new_tokens=4))\n"
        "reward = lambda texts: [1.0] * len(texts)\n"
        f"verl.Trainer(actor, reward_fn=reward, algorithm=Own(), log_dir=False, **{options}).step(['a', 'b'])\n"
    )
    return path


@pytest.mark.slow
def test_an_error_of_one_rank_ends_the_job_with_its_own_traceback(tiny: Path, tmp_path: Path) -> None:
    script = with_loss_of_rank_1(tmp_path / "script.py", "raise ZeroDivisionError('the loss of rank 1')")
    done = torchrun(2, script, tiny, check=False)
    assert done.returncode != 0
    assert "ZeroDivisionError: the loss of rank 1" in done.stderr
    assert "in role 'actor', rank 1 of 2" in done.stderr


@pytest.mark.slow
def test_a_rank_that_hangs_is_waited_for_as_long_as_the_trainer_says(tiny: Path, tmp_path: Path) -> None:
    script = with_loss_of_rank_1(tmp_path / "script.py", "time.sleep(600)", deadline=6)
    began = time.monotonic()
    done = torchrun(2, script, tiny, check=False)
    assert done.returncode != 0 and time.monotonic() - began < 120
    assert "rank 0 of 2" in done.stderr and "waited in 'actor.update'" in done.stderr
    assert "silent for 6 s" in done.stderr


def test_ranks_have_the_deadline_of_a_pipeline(tiny: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, verl\n"
        "actor = verl.Actor(sys.argv[1], sampling=verl.SamplingParams(max_new_tokens=2))\n"
        "updater = verl.Updater('grpo', actor=actor)\n"
        "pipeline = verl.RLDataPipeline(n=2, deadline=77)\n"
        "pipeline.add_stage('rollout', actor).add_stage('reward', lambda texts: [float(len(t)) for t in texts])\n"
        "pipeline.add_stage('update', updater)\n"
        "assert {node.deadline for node in pipeline.graph.nodes.values() if node.role} == {154}\n"
        "assert pipeline.run(['a', 'b']).metrics['lr/actor'] > 0\n"
        "assert actor.controller.world().timeout == 77\n"
    )
    torchrun(2, script, tiny)


@pytest.mark.slow
def test_ranks_that_disagree_are_told_so(tiny: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, verl\n"
        "actor = verl.Actor(sys.argv[1], sampling=verl.SamplingParams(max_new_tokens=4))\n"
        "sequences = actor.generate_sequences(['a', 'b'])\n"
        "actor.update(sequences, [float(os.environ['RANK']), 1.0])\n"
    )
    done = torchrun(2, script, tiny, check=False)
    assert done.returncode != 0
    assert "hold another batch" in done.stderr


def test_the_threads_of_collectives_end_before_the_interpreter(tmp_path: Path) -> None:
    """One that drops the last reference to a tensor later than that aborts the process."""
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, sys\n"
        "import torch.distributed as dist\n"
        "from verl.controller.world import here\n"
        "atexit.register(lambda: sys.stdout.write(f'left {not dist.is_initialized()}\\n'))\n"
        "here(60.0, 'cpu').exchange('verb', 1)\n"
    )
    assert torchrun(2, script).stdout.count("left True") == 2


def test_whoever_waits_for_what_rank_0_does_is_told_when_it_dies(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time, verl.controller.once as once\n"
        "assert once.on_main('both live', lambda: 7) == 7\n"
        "def die():\n"
        "    time.sleep(1)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "once.on_main('a write', die)\n"
    )
    began = time.monotonic()
    # torchrun looks every 0.1 s and ends the others of a dead rank at once: rank 1 gets time to say what it waits for.
    done = torchrun(2, "--monitor-interval=3", script, check=False)
    assert done.returncode != 0
    assert "rank 1 of 2" in done.stderr and "waited in 'a write': another rank died" in done.stderr
    assert time.monotonic() - began < 25  # torchrun ends what does not end by itself 30 s after the death
