"""`verl eval`, as its user calls it."""

from __future__ import annotations

import json
from math import comb
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from verl.cli.main import app
from verl.run.evaluate import pass_at


def verl_eval(*args: Any) -> Result:
    return CliRunner().invoke(app, ["eval", *map(str, args)])


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """Problems whose answer is whether a response has an even number of letters."""
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"once upon {i}", "answer": i % 2}) + "\n" for i in range(12)))
    (tmp_path / "rewards.py").write_text(
        "def right(responses, answer):\n    return [float(len(r) % 2 == a) for r, a in zip(responses, answer)]\n\n\n"
        "def long(responses):\n    return [len(r) / 7 for r in responses]\n"
    )
    return file


def test_accuracy_and_pass_at_k_with_intervals(tiny: Path, problems: Path) -> None:
    reward = f"{problems.parent}/rewards.py:right"
    short = "actor_rollout_ref.rollout.max_new_tokens=6"
    result = verl_eval(tiny, problems, short, "--reward", reward, "-n", 4, "--json")
    assert result.exit_code == 0, result.output
    (of,) = json.loads(result.stdout.splitlines()[-1])["models"]
    assert of["problems"] == 12 and of["abstained"] == 0
    of = of["metrics"]
    assert of["accuracy"]["value"] == of["reward"]["value"]
    assert of["accuracy"]["value"] <= of["pass@2"]["value"] <= of["pass@4"]["value"] <= 1
    for name in ("accuracy", "reward", "pass@2", "pass@4"):
        assert of[name]["low"] <= of[name]["value"] <= of[name]["high"]
    table = verl_eval(tiny, problems, short, "--reward", reward, "--limit", 5)
    assert table.exit_code == 0, table.output
    assert "5 problems, 95 % intervals" in table.stdout and "accuracy" in table.stdout and "pass@" not in table.stdout


def test_two_models_are_compared_problem_by_problem(make_tiny: Any, tiny: Path, problems: Path) -> None:
    args = (tiny, problems, "actor_rollout_ref.rollout.max_new_tokens=6")
    reward = f"{problems.parent}/rewards.py:long"
    same = verl_eval(*args, "--reward", reward, "--against", tiny, "--json")
    assert same.exit_code == 0, same.output
    result = json.loads(same.stdout.splitlines()[-1])
    assert [of["model"] for of in result["models"]] == [str(tiny)] * 2
    assert result["gains"] == {"reward": {"value": 0.0, "low": 0.0, "high": 0.0}}  # no number of right answers
    other = verl_eval(*args, "--reward", reward, "--against", make_tiny(seed=1))
    assert other.exit_code == 0, other.output
    assert "before" in other.stdout and "gain" in other.stdout and str(tiny) in other.stdout


def test_a_recipe_has_problems_and_reward(tiny: Path, problems: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(problems.parent)
    Path("recipe.yaml").write_text(
        "data: {train: problems.jsonl, eval: problems.jsonl}\nreward: {path: 'rewards.py:right'}\n"
        "actor_rollout_ref: {rollout: {n: 8, max_new_tokens: 5}}\nalgorithm: {name: grpo}\n"
    )
    result = verl_eval(tiny, "recipe.yaml", "--limit", 4)
    assert result.exit_code == 0, result.output
    assert "4 problems" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["problems.jsonl"], "no reward is given: --reward"),
        (["nope.jsonl", "--reward", "rewards.py:right"], "nope.jsonl"),
        (["problems.jsonl", "--reward", "rewards.py:wrong"], "wrong"),
        (["problems.jsonl", "--reward", "nope"], "nope"),
        (["problems.jsonl", "--reward", "rewards.py:right", "-n", "3", "--temperature", "0"], "raise --temperature"),
        (["problems.jsonl", "--reward", "rewards.py:right", "trainer.stepz=1"], "stepz"),
        (["bare.jsonl", "--reward", "rewards.py:right"], "answer"),
    ],
)
def test_bad_input_is_named(
    tiny: Path, problems: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.chdir(problems.parent)
    Path("bare.jsonl").write_text('{"prompt": "once"}\n')
    result = verl_eval(tiny, *args)
    assert result.exit_code in (1, 2) and result.output.startswith("error: ") and message in result.output, (
        result.output
    )


def test_an_episode_that_gives_its_reward_needs_none_beside_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("play.py").write_text(
        "from verl.rollout.episode import Turns\n\n\n"
        "async def play(client, row):\n"
        "    sample = await client.generate(row['prompt_tokens'])\n"
        "    turns = Turns().wrote(sample)\n"
        "    turns.reward = 1.0\n"
        "    return [turns]\n\n\n"
        "play.gives_reward = True\n"
    )
    Path("data.jsonl").write_text('{"prompt": "Once"}\n{"prompt": "Twice"}\n')
    done = verl_eval(
        tiny, "data.jsonl", "actor_rollout_ref.rollout.episode=play.py:play",
        "actor_rollout_ref.rollout.max_new_tokens=4", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["models"][0]["metrics"]["reward"]["value"] == 1.0


def test_pass_at_k_is_the_share_of_draws_with_a_right_one() -> None:
    right = [1.0, 0.0, 0.0, 1.0, 0.0, None]
    assert pass_at(right, 1) == pytest.approx(2 / 5) and pass_at(right, 5) == 1.0 and pass_at(right, 6) is None
    assert pass_at(right, 2) == pytest.approx(1 - comb(3, 2) / comb(5, 2))
