"""Every registered algorithm has an example, which runs through the command as a user runs it."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.core import TyperGroup

import verl
from verl.algorithms import algorithm_names, make_algorithm
from verl.cli.main import app
from verl.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "algorithms"
TWO = "trainer.total_steps=2"
NAMES = sorted(file.stem for file in EXAMPLES.glob("*.yaml"))


def run(name: str, tiny: Path, tmp_path: Path, *more: str, sampled: bool = True) -> Path:
    """A step of an example on a tiny model; the run's directory."""
    overrides = [
        f"actor_rollout_ref.model.path={tiny}",
        "actor_rollout_ref.model.dtype=float32",
        "actor_rollout_ref.rollout.n=2",
        "data.batch_size=2",
        "trainer.total_steps=1",
        "trainer.loggers=[]",
        f"trainer.output_dir={tmp_path}",
    ]
    if make_algorithm(name).online:
        overrides += ["actor_rollout_ref.rollout.max_new_tokens=4"]
    if name == "dapo":
        overrides += ["trainer.max_resamples=1"]
    if make_algorithm(name).online and "reference" in make_algorithm(name).roles:
        overrides += [f"actor_rollout_ref.ref.path={tiny}"]
    if sampled and make_algorithm(name).online:
        overrides += ["data.train.size=8", "data.eval.size=2"]
    app(["train", str(EXAMPLES / f"{name}.yaml"), *overrides, *more], standalone_mode=False)
    return (tmp_path / "latest").resolve()


def test_every_algorithm_has_an_example() -> None:
    ours = [name for name in algorithm_names() if type(make_algorithm(name)).__module__.startswith("verl.")]
    assert ours == NAMES


@pytest.mark.quick(every=9)
@pytest.mark.parametrize("name", NAMES)
def test_the_example_runs(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(ROOT)
    path = run(name, tiny, tmp_path)
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if "updated" in record]
    assert [record["step"] for record in trained] == [1]
    evals = [json.loads(line) for line in (path / "eval.jsonl").read_text().splitlines()]
    assert [row["step"] for row in evals] == [0, 1]
    summary = json.loads((path / "summary.json").read_text())
    assert summary["state"] == "finished" and f"{summary['headline']}_after" in summary
    algorithm = make_algorithm(name)
    assert ("rollout_tokens_per_second" in summary) == ("gain" in summary) == algorithm.online
    assert summary["headline"] == (
        "accuracy" if algorithm.online else "pairs/accuracy" if algorithm.coupled else "loss"
    )
    assert ("cost/mean" in trained[0]) == ("cost" in algorithm.roles)
    for role in algorithm.roles & {"critic", "cost_critic"}:
        assert f"loss/{role}" in trained[0]


@pytest.mark.parametrize("first", ["grpo", "dpo"])
def test_at_most_three_lines_differ_within_a_family(first: str) -> None:
    kind = make_algorithm(first).online
    head = (EXAMPLES / f"{first}.yaml").read_text().splitlines()
    for name in (name for name in NAMES if make_algorithm(name).online == kind):
        lines = (EXAMPLES / f"{name}.yaml").read_text().splitlines()
        changes = [line for line in difflib.ndiff(head, lines) if line.startswith("+ ")]
        assert len(changes) <= 3, (name, changes)


def test_the_data_are_what_their_script_writes(tmp_path: Path) -> None:
    script = tmp_path / "make_data.py"
    script.write_text((EXAMPLES / "make_data.py").read_text())
    subprocess.run([sys.executable, str(script)], check=True, timeout=60)
    made = {file.name: file.read_text() for file in (tmp_path / "data").iterdir()}
    assert made == {file.name: file.read_text() for file in (EXAMPLES / "data").iterdir()}


@pytest.mark.slow
def test_a_run_over_recorded_data_goes_on_where_it_was(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    lr = "actor_rollout_ref.actor.optim.lr=0.001"
    run("kto", tiny, tmp_path / "a", lr)
    losses = []
    for part in ("a", "b"):
        path = run("kto", tiny, tmp_path / part, lr, "trainer.total_steps=4", "trainer.save_every=2")
        records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        losses.append([record["loss/actor"] for record in records if "loss/actor" in record])
    assert len(losses[0]) == 4 and losses[0] == losses[1]


def test_recorded_experience_trains_an_algorithm_that_can_sample(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline reinforcement learning: nothing is sampled but for the evaluation."""
    monkeypatch.chdir(ROOT)
    actor = verl.Actor(str(tiny))
    samples = actor.generate_sequences([f"Number {i}" for i in range(4)], n=2, max_new_tokens=4)
    rewards = [float(len(set(tokens))) for tokens in samples["response_tokens"]]
    samples.add({"reward": rewards}).to_parquet(tmp_path / "seen.parquet")
    path = run("rloo", tiny, tmp_path, "data.eval.size=2", f"data.train={tmp_path / 'seen.parquet'}", sampled=False)
    first = json.loads((path / "metrics.jsonl").read_text().splitlines()[1])
    assert first["updated"] and "rollout/tokens" not in first
    summary = json.loads((path / "summary.json").read_text())
    assert "gain" in summary and "rollout_tokens_per_second" not in summary


def test_settings_that_contradict_the_algorithm_are_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("verl.cli.main._Commands.invoke", TyperGroup.invoke)

    def told(name: str, *overrides: str) -> str:
        with pytest.raises(ConfigError) as found:
            run(name, tiny, tmp_path, *overrides)
        return str(found.value)

    assert "has no cost: leave the section 'cost' out" in told("grpo", "cost.path=examples/algorithms/cost.py:length")
    assert "has no reward" in told("dpo", "reward.name=task")
    assert "no cost is given: set cost.path" in told("safe_rlhf", "cost.path=null")
    assert "n=1 leaves nothing to compare: set n to 2 or more" in told("rloo", "actor_rollout_ref.rollout.n=1")
    assert "at most the 4 rows of a step" in told(
        "dpo", "actor_rollout_ref.actor.mini_batch_size=5", "data.batch_size=2", "actor_rollout_ref.rollout.n=3"
    )
    assert "must be a JSONL or Parquet file" in told("sft", "data.train={task: chain_sum}")
    assert "data.prompt_column is for prompts" in told("sft", "data.prompt_column=prompt")
    assert "data.max_response_length is for recorded" in told("ppo", "data.max_response_length=3")
    assert "nothing would run" in told("ppo", "trainer.total_steps=0", "data.eval=null")


@pytest.mark.slow
def test_a_schedule_over_recorded_pairs_has_one_update_a_step(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    path = run("dpo", tiny, tmp_path, "actor_rollout_ref.actor.optim={lr: 0.001, schedule: linear}", TWO)
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [r["lr/actor"] for r in records if "lr/actor" in r] == pytest.approx([0.001, 0.0005])
    half = "actor_rollout_ref.actor.mini_batch_size=2"  # two updates a step of two pairs
    path = run("dpo", tiny, tmp_path, "actor_rollout_ref.actor.optim={lr: 0.001, schedule: linear}", half, TWO)
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [r["lr/actor"] for r in records if "lr/actor" in r][1] == pytest.approx(0.000375)
