"""One script in one process and under torchrun: the same parameters, metrics and samples."""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests import ranks
from tests.ranks import job, torchrun
from verl.data.buffers import DiskBuffer

SCRIPT = Path(__file__).with_name("three_steps.py")
CLOCK = ("busy/",)
#: How the ranks of a job are started.
Start: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]
STARTS = pytest.mark.parametrize("start", [job, pytest.param(torchrun, marks=pytest.mark.slow)])


def outcome(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return torch.load(folder / "weights.pt"), json.loads((folder / "run.json").read_text())


def assert_equal_runs(one: Path, other: Path, rewards: float = 0.0) -> None:
    """`rewards`: how far those may be apart, where a model computed them in other batches."""
    (weights, run), (weights_, run_) = outcome(one), outcome(other)
    assert weights.keys() == weights_.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weights_[name], weight, rtol=0, atol=1e-9, msg=name)
    for ours, theirs in zip(run["samples"], run_["samples"], strict=True):
        assert theirs["id"] == ours["id"] and theirs["response_tokens"] == ours["response_tokens"]
        assert theirs["reward"] == pytest.approx(ours["reward"], rel=0, abs=rewards)
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


def test_roles_that_overlap_in_part_have_groups_of_their_own_along_dimensions() -> None:
    done = job(4, SCRIPT.with_name("rank_groups.py"))
    alone = {"critic sp": 3.0, "critic replicate": 3.0, "actor shard": 3.0}
    together = {"critic shard": 2.0 + 3.0, "actor sp": 2.0 + 3.0, "actor replicate": 1.0 + 3.0}
    assert json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))) == alone | together


@STARTS
def test_two_ranks_equal_one_process(alone: tuple[Path, Path], tmp_path: Path, start: Start) -> None:
    model, expected = alone
    start(2, SCRIPT, model, tmp_path)
    assert_equal_runs(expected, tmp_path)


@pytest.mark.slow
def test_two_ranks_with_a_part_of_the_models_each_equal_one_process(alone: tuple[Path, Path], tmp_path: Path) -> None:
    model, expected = alone
    job(2, SCRIPT, model, tmp_path, "null", json.dumps({"strategy": "fsdp"}))
    assert_equal_runs(expected, tmp_path)


@pytest.mark.slow
def test_two_ranks_that_read_the_base_of_adapters_in_parts_equal_one_process(
    alone: tuple[Path, Path], tmp_path: Path
) -> None:
    lora = json.dumps({"lora": {"r": 4, "alpha": 8}})
    (tmp_path / "one").mkdir()
    ranks.alone(SCRIPT, alone[0], tmp_path / "one", "null", "null", "8", "null", lora)
    job(2, SCRIPT, alone[0], tmp_path, "null", json.dumps({"strategy": "fsdp"}), "8", "null", lora)
    assert_equal_runs(tmp_path / "one", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tensor", "pipeline"])
def test_two_ranks_that_share_the_layers_equal_one_process(alone: tuple[Path, Path], tmp_path: Path, way: str) -> None:
    model, expected = alone
    job(2, SCRIPT, model, tmp_path, "null", json.dumps({f"{way}_parallel_size": 2}))
    assert_equal_runs(expected, tmp_path)


@pytest.mark.slow
def test_one_optimizer_step_a_batch_with_a_part_of_the_models_each_equals_one_process(
    alone: tuple[Path, Path], tmp_path: Path
) -> None:
    # The log-probs before the update are then those of the rollout.
    (tmp_path / "one").mkdir()
    ranks.alone(SCRIPT, alone[0], tmp_path / "one", "null", "null", "null")
    job(2, SCRIPT, alone[0], tmp_path, "null", json.dumps({"strategy": "fsdp"}), "null")
    assert_equal_runs(tmp_path / "one", tmp_path)


@pytest.mark.slow
def test_one_rank_rolls_out_and_one_trains(alone: tuple[Path, Path], tmp_path: Path) -> None:
    model, expected = alone
    placement = {"rollout": "cpu:0", "actor": "cpu:1", "critic": "cpu:1", "reference": "cpu:0"}
    job(2, SCRIPT, model, tmp_path, json.dumps(placement))
    assert_equal_runs(expected, tmp_path)


@pytest.fixture(scope="module")
def scored(alone: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A reward model, and what one process made with it."""
    folder, out = tmp_path_factory.mktemp("reward"), tmp_path_factory.mktemp("scored")
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(alone[0], num_labels=1, dtype=torch.float64)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(alone[0]).save_pretrained(folder)
    ranks.alone(SCRIPT, alone[0], out, "null", "null", "8", json.dumps(str(folder)))
    return folder, out


@pytest.mark.slow
def test_one_map_places_actor_critic_and_reward(
    alone: tuple[Path, Path], scored: tuple[Path, Path], tmp_path: Path
) -> None:
    placement = {
        "actor": {"cpu_ids": [0, 1], "parallel": "tensor"},
        "critic": {"cpu_ids": [2], "parallel": "data"},
        "reward": {"cpu_ids": [2, 3]},
    }
    folder, expected = scored
    job(4, SCRIPT, alone[0], tmp_path, json.dumps(placement), "null", "8", json.dumps(str(folder)))
    assert_equal_runs(expected, tmp_path, rewards=1e-12)


@pytest.mark.slow
def test_copies_of_the_actor_have_its_weights_where_it_does_not_stand(
    make_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    file = tmp_path / "script.py"
    file.write_text(
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
    job(2, file, make_tiny("gpt2", torch.float64))


def test_a_disk_buffer_is_shared_by_the_ranks(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(
        "import sys, verl\n"
        "actor = verl.Actor(sys.argv[1], sampling={'max_new_tokens': 4})\n"
        "trainer = verl.Trainer(actor, reward_fn=lambda texts: [1.0] * len(texts), n=2, log_dir=False,\n"
        "                       buffer='disk', buffer_dir=sys.argv[2], update_freq=8, buffer_size=8)\n"
        "updated = [trainer.step(['a', 'b'])['updated'] for _ in range(3)]\n"
        "assert updated == [False, True, False], updated\n"
        "assert len(trainer.buffer) == 4 and trainer.buffer.room == 4\n"
    )
    job(2, file, tiny, tmp_path / "buffer")
    assert len(DiskBuffer(tmp_path / "buffer", 8)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_rewards_run_once_and_checkpoints_move_between_rank_counts(tiny: Path, tmp_path: Path, strategy: str) -> None:
    file = tmp_path / "script.py"
    file.write_text(
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
        "found = [(record['reward'], record['loss/actor'], record['grad_norm/actor']) for record in records]\n"
        "pathlib.Path(f'{out}/{mode}.json').write_text(json.dumps(found))\n"
    )
    job(2, file, tiny, tmp_path, "save", strategy)
    assert set((tmp_path / "calls").read_text()) == {"0"}
    ranks.alone(file, tiny, tmp_path, "alone", strategy)
    job(2, file, tiny, tmp_path, "load", strategy)
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
    file = with_loss_of_rank_1(tmp_path / "script.py", "raise ZeroDivisionError('the loss of rank 1')")
    done = job(2, file, tiny, check=False)
    assert done.returncode != 0
    assert "ZeroDivisionError: the loss of rank 1" in done.stderr
    assert "in role 'actor', rank 1 of 2" in done.stderr


@pytest.mark.slow
def test_a_rank_that_hangs_is_waited_for_as_long_as_the_trainer_says(tiny: Path, tmp_path: Path) -> None:
    file = with_loss_of_rank_1(tmp_path / "script.py", "time.sleep(600)", deadline=6)
    began = time.monotonic()
    done = job(2, file, tiny, check=False)
    assert done.returncode != 0 and time.monotonic() - began < 120
    assert "rank 0 of 2" in done.stderr and "waited in 'actor.update'" in done.stderr
    assert "silent for 6 s" in done.stderr


def test_ranks_have_the_deadline_of_a_pipeline(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(
        "import sys, verl\n"
        "actor = verl.Actor(sys.argv[1], sampling=verl.SamplingParams(max_new_tokens=2))\n"
        "updater = verl.Updater('grpo', actor=actor)\n"
        "pipeline = verl.RLDataPipeline(n=2, deadline=77)\n"
        "pipeline.add_stage('rollout', actor).add_stage('reward', lambda texts: [float(len(t)) for t in texts])\n"
        "pipeline.add_stage('update', updater)\n"
        "assert {node.deadline for node in pipeline.graph.nodes.values() if node.role} == {154}\n"
        "assert pipeline.run(['a', 'b']).metrics['lr/actor'] > 0\n"
        "assert actor.controller.transport.timeout == 77 == actor.controller.transport.worker.timeout\n"
    )
    job(2, file, tiny)


def script(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_different_handles_on_the_ranks_are_an_error_that_names_the_first(tiny: Path, tmp_path: Path) -> None:
    file = script(
        tmp_path / "script.py",
        "import os, sys, verl",
        "handles = [verl.Actor, verl.Critic]",
        "for handle in handles if os.environ['RANK'] == '0' else handles[::-1]:",
        "    made = handle.from_pretrained(sys.argv[1])",
        "made.controller.start()",
    )
    done = job(2, file, tiny, check=False)
    assert done.returncode != 0
    assert "ClusterError: ranks 0 and 1 made different handles before the first call" in done.stderr
    assert "number 0 is Actor.model (" in done.stderr and "and Critic.model (ValueModel) on rank 1" in done.stderr


@STARTS
def test_a_script_prints_each_line_once(tiny: Path, tmp_path: Path, start: Start) -> None:
    file = script(
        tmp_path / "script.py",
        "import sys, verl",
        "actor = verl.Actor(sys.argv[1], sampling={'max_new_tokens': 2})",
        "print('before the first call')",
        "print(len(actor.generate_sequences(['a', 'b', 'c'])), 'samples')",
    )
    assert start(2, file, tiny).stdout.splitlines() == ["before the first call", "3 samples"]


@STARTS
def test_the_article_s_loop_prints_each_line_once(tiny: Path, start: Start) -> None:
    options = ["--actor_model", tiny, "--steps", 2, "--batch_size", 4, "--max_new_tokens", 4]
    done = start(2, "examples/ppo_simple.py", *map(str, options))
    assert [line[:6] for line in done.stdout.splitlines() if line.startswith("step")] == ["step 0", "step 1"]


def test_a_function_runs_on_every_rank(tiny: Path, tmp_path: Path) -> None:
    file = script(
        tmp_path / "script.py",
        "import os, sys, verl",
        "def rank_plus(number):",
        "    if number > 10: raise ValueError(f'{number} is too much')",
        "    return [int(os.environ.get('RANK', 0)), number]",
        "print(verl.everywhere(rank_plus, 5))",
        "try: verl.everywhere(lambda: 1)",
        "except verl.errors.ConfigError as error: print(error)",
        "try: verl.everywhere(rank_plus, 11)",
        "except ValueError as error: print(error)",
        "print(verl.everywhere(rank_plus, 6))",
    )
    lines = job(2, file).stdout.splitlines()
    assert lines[0] == "[[0, 5], [1, 5]]" and lines[2:] == ["11 is too much", "[[0, 6], [1, 6]]"]
    assert "<lambda> of __main__ is no module-level function" in lines[1]
    assert ranks.alone(file).stdout.splitlines()[0] == "[[0, 5]]"


@pytest.mark.slow
def test_an_object_made_after_the_first_verb_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    file = script(
        tmp_path / "script.py",
        "import sys, verl",
        "actor = verl.Actor(sys.argv[1], sampling={'max_new_tokens': 2})",
        "actor.generate_sequences(['a'])",
        "class Late:",
        "    async def __call__(self, client, row): return None",
        "try: verl.Actor(sys.argv[1], episode=Late()).generate_sequences(['a'])",
        "except verl.errors.ConfigError as error: print(error)",
        "again = verl.Actor(sys.argv[1], sampling={'max_new_tokens': 2})",  # a model and a tokenizer travel as data
        "assert len(again.generate_sequences(['a', 'b'])) == 2",
    )
    assert "Late (__main__) was made after the first call" in job(2, file, tiny).stdout


def test_the_state_of_an_algorithm_travels_with_each_order(tiny: Path, tmp_path: Path) -> None:
    file = script(
        tmp_path / "script.py",
        "import sys, verl, torch",
        "class Own(verl.BaseAlgorithm):",
        "    scale: float = 1.0",
        "    seen = 0",
        "    def state_dict(self): return {'seen': self.seen}",
        "    def load_state_dict(self, state): self.seen = state['seen']",
        "    def compute_loss(self, x):",
        "        worth = self.scale * self.seen",
        "        return verl.Loss(total=worth * (x.weights * x.log_probs).sum(), metrics={'worth/max': worth})",
        "own = Own()",
        "actor = verl.Actor(sys.argv[1], algorithm=own, sampling={'max_new_tokens': 2})",
        "sequences = actor.generate_sequences(['a', 'b', 'c', 'd'])",
        "own.seen, own.scale = 3, 2.0",
        "grads = actor.update(sequences, [1.0, 2.0, 3.0, 4.0])['grad_norm']",
        "own.seen = 0",
        "again = actor.update(sequences, [1.0, 2.0, 3.0, 4.0])['grad_norm']",
        "print(grads > 0, again)",
    )
    assert job(2, file, tiny).stdout.split() == ["True", "0.0"]


def test_a_model_that_is_wrapped_after_the_first_verb_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    file = script(
        tmp_path / "script.py",
        "import sys, torch, verl",
        "from torch.distributed.device_mesh import init_device_mesh",
        "from torch.distributed.fsdp import fully_shard",
        "from transformers import AutoModelForCausalLM",
        "verl.Controller().start()",
        "model = fully_shard(AutoModelForCausalLM.from_pretrained(sys.argv[1]), mesh=init_device_mesh('cpu', (1,)))",
        "try: verl.Actor(model, sys.argv[1])",
        "except verl.errors.ModelError as error: print(error)",
    )
    assert "the model is sharded over several ranks, and after the first call" in job(2, file, tiny).stdout
