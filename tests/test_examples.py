"""The examples run, as they stand, from any directory."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import verl
from tests import forked, ranks
from verl.config import load_config

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NUMBERS = r"reward [\d.]+  kl [\d.e-]+  loss/actor [+-][\d.e-]+  loss/critic [\d.e-]+"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_grpo_from_scratch_has_the_losses_of_the_trainer(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load("grpo_from_scratch")

    def reward(text: str, answer: int = 0) -> float:
        return float(sum(map(ord, text)) % 5)  # a random model sums nothing up

    for name, value in {"PROMPTS": 4, "SAMPLES": 4, "ROWS": 6, "reward": reward}.items():
        monkeypatch.setattr(example, name, value)
    settings = ["--model", str(tiny), "--steps", "3", "--dtype", "float64", "--tokens", "8", "--lr", "0.01", "--json"]
    example.main(settings)
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    actor = verl.Actor(tiny, dtype="float64", optim={"lr": 0.01})
    options: dict[str, Any] = {"algorithm": "grpo", "n": 4, "sampling": {"max_new_tokens": 8}, "log_dir": False}
    trainer = verl.Trainer(actor, reward_fn=lambda texts: [reward(text) for text in texts], **options)
    for step, record in enumerate(records):
        questions = [example.problem(step * 4 + row)[0] for row in range(4)]
        expected = trainer.step([[{"role": "user", "content": question}] for question in questions])
        assert record["reward"] == expected["reward"]
        assert record["loss"] == pytest.approx(expected["loss/actor"], abs=1e-9)
        # transformers' norms compute in fp32 whatever the model's dtype.
        assert record["grad_norm"] == pytest.approx(expected["grad_norm/actor"], rel=1e-7)
    assert any(abs(record["loss"]) > 1e-3 for record in records)


@pytest.mark.slow
def test_ppo_simple_as_a_script(tmp_path: Path, make_tiny: Callable[..., Path], tiny: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "ppo_simple.py"), "--actor_model", str(make_tiny("gpt2"))]
    command += ["--critic-model", str(tiny), "--steps=2"]
    done = forked.run(command, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(
        r"^step 1  reward [\d.]+  kl [\d.e-]+  loss/actor [+-][\d.e-]+  loss/critic [\d.e-]+$", done.stdout, re.M
    )


@pytest.mark.slow
def test_ppo_simple_with_workers_on_ray(tmp_path: Path, tiny: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "ppo_simple.py"), "--actor_model", str(tiny), "--steps=2"]
    workers = ["--num_rollout_workers", "2", "--num-update-workers", "1"]
    done = forked.run([*command, *workers], cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "cpu:2  ·        0/1" in done.stdout and "step 1  reward" in done.stdout


SMALL = ["--config-path", "configs/ppo_llama3.yaml", "--steps", "2", "--batch_size", "4", "--max-new-tokens", "8"]
SMALL += ["actor_rollout_ref.model.dtype=float32", "critic.model.dtype=float32"]
SMALL += ["data.train.size=40", "data.eval.size=4", "algorithm.gamma=0.9"]


def test_ppo_simple_follows_every_setting_of_its_recipe(tmp_path: Path, tiny: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "ppo_simple.py"), *SMALL, "--actor_model", str(tiny), "--lr", "0.5"]
    done = forked.run(command, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(
        r"^step 2/2  reward [\d.]+  kl [\d.e-]+  loss/actor [+-][\d.e-]+  loss/critic [\d.e-]+", done.stdout, re.M
    )
    run = (tmp_path / "runs" / "latest").resolve()
    assert len((run / "eval.jsonl").read_text().splitlines()) == 2 and (run / "checkpoints" / "step-000002").is_dir()
    used = load_config(run / "config.yaml")
    policy, critic = used.actor_rollout_ref, used.critic
    assert (policy.actor.optim.lr, critic.optim.lr, used.data.batch_size, used.trainer.total_steps) == (0.5, 0.5, 4, 2)
    assert (policy.rollout.max_new_tokens, policy.model.path) == (8, str(tiny))
    assert (used.algorithm.name, used.algorithm.options) == ("ppo", {"gamma": 0.9})


@pytest.mark.slow
def test_ppo_simple_with_ranks_that_roll_out_and_ranks_that_update(tmp_path: Path, tiny: Path) -> None:
    def run(ranks_: int, name: str, *placement: str) -> tuple[str, list[list[float]]]:
        line = [EXAMPLES / "ppo_simple.py", *SMALL, "--actor_model", tiny, f"trainer.output_dir={tmp_path / name}"]
        done = ranks.alone(*line) if ranks_ == 1 else ranks.torchrun(ranks_, *line, *placement)
        return done.stderr, steps(done)

    alone = run(1, "alone")[1]
    assert len([row for row in alone if len(row) >= 6]) == 2  # step, steps, reward, kl, two losses
    apart = ["--num-rollout-workers", "1", "--num-update-workers", "1"]
    for name, placement, picture in (
        ("apart", apart, "cpu:0  ·      0/1      ·       ·\ncpu:1  0/1    ·        0/1     0/1"),
        ("both", [], "cpu:1  1/2    1/2      1/2     1/2"),
    ):
        errors, found = run(2, name, *placement)
        assert picture in "\n".join(map(str.strip, errors.splitlines())), "further lines of a message are indented"
        assert are_near(found, alone)


def steps(done: subprocess.CompletedProcess[str]) -> list[list[float]]:
    """The numbers of the printed steps, without speeds."""
    rows = [text.partition("rollout")[0] for text in done.stdout.splitlines() if text.startswith("step")]
    return [[float(number) for number in re.findall(r"(?<![\w.])[+-]?\d[\d.]*(?:e-\d+)?", row)] for row in rows]


def are_near(some: list[list[float]], others: list[list[float]]) -> bool:
    """Equal up to a unit of the last digit that is printed, which rounding decides."""
    return all(one == pytest.approx(other, abs=1.1e-3) for one, other in zip(some, others, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(), ("--tensor_parallel_size", "2")], ids=["fsdp", "fsdp and tensor"])
@pytest.mark.parametrize("executor", ["torchrun", "ray"])
def test_ppo_train_on_four_ranks_trains_and_resumes(
    tmp_path: Path, tiny: Path, executor: str, layout: tuple[str, ...]
) -> None:
    line = [EXAMPLES / "ppo_train.py", "--model", tiny, "--batch_size", "8", "--steps"]

    def run(count: str) -> list[list[float]]:
        options = [count, "--use_fsdp", *layout, "--checkpoint_dir", tmp_path]
        if executor == "torchrun":
            return steps(ranks.torchrun(4, *line, *options))
        return steps(ranks.alone(*line, *options, "--placement", "cpu:0-3"))

    alone = steps(ranks.alone(*line, "3"))
    assert len(alone) == 3
    assert are_near(run("1"), alone[:1])
    assert are_near(run("3"), alone[1:])


@pytest.mark.slow
def test_an_algorithm_of_the_users_own_learns(tiny: Path) -> None:
    example = load("custom_algorithm")
    learned = example.main(["--model", str(tiny), "--steps", "60", "--lr", "0.01"])
    control = example.main(["--model", str(tiny), "--steps", "60", "--lr", "0"])
    assert sum(learned[-6:]) / 6 > sum(control[-6:]) / 6 + 0.1, (learned[-6:], control[-6:])


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_step_as_an_expression(tiny: Path, capsys: pytest.CaptureFixture[str], algorithm: str) -> None:
    records = load("dataflow_expression").main(["--model", str(tiny), "--steps", "2", "--algorithm", algorithm])
    assert len(records) == 2 and all(0 <= record["reward"] <= 1 and "loss/actor" in record for record in records)
    assert "update_actor" in capsys.readouterr().out


def test_a_node_of_the_users_own_trains(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("safety_reward_node")
    records = example.main(["--model", str(tiny), "--steps", "2"])
    assert all(0 <= record["cost/mean"] <= 1 and record["updated"] for record in records)
    drawn = capsys.readouterr().out.splitlines()
    assert any("safety_reward" in line and "─▶ cost" in line for line in drawn)


def test_an_engine_of_the_users_own_trains(tiny: Path) -> None:
    import verl

    sampling = verl.SamplingParams(max_new_tokens=6, temperature=0.8)
    actor = verl.Actor(str(tiny), rollout=f"{EXAMPLES / 'custom_engine.py'}:OneByOne", sampling=sampling)
    trainer = verl.Trainer(actor, reward_fn=lambda texts: [float(len(set(text))) for text in texts], n=4, log_dir=False)
    for step in range(2):
        record = trainer.step(["Once upon a time", "In the beginning"])
        # Every engine's mismatch is reported; this one reads the live weights.
        assert 0 <= record["mismatch/log_ratio/max"] < 1e-4, step


def test_rewards_of_every_form() -> None:
    import verl

    rows = {"id": ["a"], "prompt": ["What?"], "response": ["please"], "response_tokens": [[1]]}
    rows |= {"data_source": ["mine"], "reward_model": [{"ground_truth": "please"}]}
    batch = verl.Batch.from_columns(rows)
    for name, value in (("exact", 1.0), ("polite", 1.0), ("brevity", 0.0)):
        found = verl.Reward(f"{EXAMPLES / 'custom_reward.py'}:{name}").get_reward(batch)
        assert found["reward"] == [value], name


@pytest.mark.slow
def test_the_calculator_is_called_from_yaml(tmp_path: Path, tiny: Path) -> None:
    """A step with a model that knows nothing; what it learns to do takes a real one and minutes."""
    command = [sys.executable, "-m", "verl", "train", "examples/calculator.yaml"]
    command += [f"actor_rollout_ref.model.path={tiny}", f"trainer.output_dir={tmp_path}", "trainer.total_steps=1"]
    command += ["data.train.size=20", "data.eval.size=4", "data.batch_size=2", "actor_rollout_ref.model.dtype=float32"]
    done = forked.run(command, cwd=EXAMPLES.parent, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 1/1" in done.stderr + done.stdout
    (run,) = (path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink())
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum("rollout/failed_episodes" in record for record in records) == 1
    assert not any(record.get("rollout/failed_episodes") for record in records)


@pytest.mark.slow
def test_three_tasks_from_yaml(tmp_path: Path, tiny: Path) -> None:
    """Two steps with a model that knows nothing; what it learns takes a real one and minutes."""
    command = [sys.executable, "-m", "verl", "train", "examples/multi_task/tasks.yaml"]
    command += [f"actor_rollout_ref.model.path={tiny}", f"trainer.output_dir={tmp_path}", "trainer.total_steps=2"]
    command += ["data.train.sums.size=20", "data.eval.sums.size=4", "data.batch_size=4"]
    done = forked.run(command, cwd=EXAMPLES.parent, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = (path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink())
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name in ("sums", "dates", "style"):
        assert sum(record.get(f"task/{name}/samples", 0) for record in records) > 0
    page = (run / "report.html").read_text()
    assert '"task/sums/share"' in page and '"eval/task/style/reward"' in page
