"""The scores of volcengine/verl by a row's data_source."""

from __future__ import annotations

import asyncio

import pytest

from verl.batch import Batch
from verl.errors import RewardError
from verl.rewards.by_source import score_by_source
from verl.rewards.make import make_reward


@pytest.mark.parametrize(
    ("source", "response", "answer", "score"),
    [
        ("openai/gsm8k", "so 3 + 4 = 7\n#### 7", "7", 1.0),
        ("openai/gsm8k", "#### 1,234", "1234", 1.0),
        ("openai/gsm8k", "#### 8\n#### 7", "7", 1.0),
        ("openai/gsm8k", "the answer is 7", "7", 0.0),
        ("openai/gsm8k", "#### 7" + " " * 400, "7", 0.0),
        ("lighteval/MATH", r"\boxed{1} no, \boxed{\dfrac{1}{2}}", r"\frac{1}{2}", 1.0),
        ("HuggingFaceH4/MATH-500", r"\boxed{x = \frac12}", "0.5", 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"(3,\frac{\pi}{2})", 1.0),
        ("lighteval/MATH", r"\boxed{50\%}", "50", 1.0),
        ("lighteval/MATH", "it is 5", "5", 0.0),
    ],
)
def test_scores(source: str, response: str, answer: str, score: float) -> None:
    assert score_by_source(source, response, answer) == score


def test_other_rows_have_none() -> None:
    with pytest.raises(RewardError, match=r"'codecontests' have no score here .*write reward\.path"):
        score_by_source("codecontests", "x", "y")


def test_by_name() -> None:
    rows = [
        {"prompt": "1 + 1", "response": response, "data_source": "openai/gsm8k", "ground_truth": "2"}
        for response in ("#### 2", "2")
    ]
    assert asyncio.run(make_reward("data_source").score(Batch.from_rows(rows))).reward == [1.0, 0.0]
