from __future__ import annotations

from typing import Any

import pytest

from verl.batch import Batch
from verl.data.prompts import load_prompts
from verl.errors import ConfigError
from verl.rewards.make import make_reward
from verl.rewards.reasoning_gym import extract_answer
from verl.rewards.source import run_reward


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("7", "7"),
        ("The answer is 12.", "12"),
        ("3 + 4 = 7", "7"),
        ("so -5", "-5"),
        ("it is −5", "-5"),
        ("9-5", "5"),
        ("(2)-5", "5"),
        ("= -5.25", "-5.25"),
        ("1,234,567 apples", "1234567"),
        ("1, 2, 3", "3"),
        ("**42**", "42"),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number(response: str, expected: str | None) -> None:
    assert extract_answer(response, "last_number") == expected


def test_whole_and_tag() -> None:
    assert extract_answer(" a b \n", "whole") == "a b"
    text = "<answer>1</answer> no, <Answer>\n2 </answer>"
    assert extract_answer(text, "tag") == "2"
    assert extract_answer("2", "tag") is None


def scored(spec: dict[str, Any], write: Any, **options: Any) -> Any:
    data = load_prompts({"size": 6, "seed": 11, **spec})
    answers = [row["ground_truth"] for row in data.batch["reward_model"]]
    batch = Batch.from_ipc(data.batch.add({"response": [write(answer) for answer in answers]}).to_ipc())
    return run_reward(make_reward("task", **options), batch)


def test_accuracy_is_exact_and_gives_no_credit_for_parts() -> None:
    right = scored({"task": "chain_sum"}, lambda answer: f"It is {answer}", answer="last_number")
    assert right.reward == right.components["accuracy"] == [1.0] * 6
    part = scored({"task": "chain_sum"}, lambda answer: f"It is {answer}", answer="whole")
    assert all(0 < reward < 1 for reward in part.reward)
    assert part.components["accuracy"] == [0.0] * 6
    exact = scored({"task": "chain_sum"}, lambda answer: f"It is {answer}", answer="whole", exact=True)
    assert exact.reward == [0.0] * 6
    wrong = scored({"task": "chain_sum"}, lambda answer: f"{int(answer) + 1}", answer="last_number")
    assert wrong.reward == [0.0] * 6
    assert scored({"task": "chain_sum"}, lambda answer: "no idea", answer="last_number").reward == [0.0] * 6


# Verifiers that look at more than the answer: tuples, ranges, a grid, an expression.
@pytest.mark.quick("arc_agi", "rearc")
@pytest.mark.parametrize(
    "task", ["arc_agi", "rearc", "countdown", "sokoban", "maze", "letter_counting", "base_conversion"]
)
def test_every_kind_of_verifier_gets_its_problem_back(task: str) -> None:
    result = scored({"task": task, "size": 2}, lambda answer: answer)
    assert result.reward == [1.0] * 2, result.reasons


def test_rows_without_a_task_and_wrong_options() -> None:
    from verl.errors import RewardError

    with pytest.raises(RewardError, match="needs a column 'reasoning_gym'"):
        run_reward(make_reward("task"), Batch.from_rows([{"prompt": "p", "response": "r"}]))
    with pytest.raises(ConfigError, match="last_number, whole, tag"):
        make_reward("task", answer="first")
