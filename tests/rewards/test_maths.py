"""Answers compared as mathematics, in processes that can be killed; rewards by a registered name."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from typing import Any

import pytest

import verl
from verl.config import build_config
from verl.errors import ConfigError
from verl.rewards.make import make_reward
from verl.rewards.maths import is_equal

needs_math_verify = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs math-verify")
#: Takes forever to evaluate.
TOWER = r"\boxed{9^{9^{9^{9}}}}"


@needs_math_verify
@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("so it is 18", "3 * 6 = <<3*6=18>>18\n#### 18", 1),
        ("3 * 6 = 18\n#### 1,234", "1234", 1),
        ("#### $1,000 a year", "1000", 1),
        (r"thus \boxed{\frac12}", "0.5", 1),
        (r"$x = 4$ and so \boxed{3}", "3", 1),
        (r"$x = 4$ and so \boxed{3}", "4", 0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
        (r"we get $\frac{3}{4}$", r"\frac{3}{4}", 1),
        ("The answer is 7.", 7, 1),
        ("The answer is 7.", "8", 0),
        ("-5", "5", 0),
        ("I do not know", "5", 0),
        ("", "5", 0),
    ],
)
def test_answers_are_equal_as_mathematics(response: str, answer: Any, expected: float) -> None:
    assert is_equal(response, answer) == expected


@needs_math_verify
def test_what_hangs_is_killed_and_abstains_alone() -> None:
    reward = verl.Reward("math", timeout=3.0, max_failure_rate=1.0)
    rows = [
        {"response": "#### 5", "answer": "5"},
        {"response": TOWER, "answer": "5"},
        {"response": r"\boxed{6}", "reward_model": {"style": "rule", "ground_truth": "5"}},
        {"response": "5", "answer": None},
    ]
    try:
        found, counts = asyncio.run(reward.score_and_count(verl.Batch.from_rows(rows)))
        assert found["reward"] == [1.0, None, 0.0, None]
        assert "no answer within 3 s" in found["abstain_reason"][1]
        assert "ground_truth or answer" in found["abstain_reason"][3]
        assert counts["late/count"] == 1 and counts["deaths/count"] == 1
        assert not reward.whole_batch
    finally:
        reward.close()


@needs_math_verify
def test_as_a_part_it_has_processes_and_the_others_none() -> None:
    reward = verl.Reward({"right": ("math", 2.0), "brief": lambda texts: [-float(len(text)) for text in texts]})
    try:
        assert list(reward.groups) == ["math"]
        rows = verl.Batch.from_rows([{"response": "5", "answer": "5"}, {"response": "66", "answer": "5"}])
        assert reward.get_reward(rows)["reward"] == [1.0, -2.0]
    finally:
        reward.close()


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"pip install 'verl-hybrid\[math\]'"):
        make_reward("math")


@verl.register_reward("test_short")
def short(texts: list[str]) -> list[float]:
    return [-float(len(text)) for text in texts]


@verl.register_reward("test_longer_than")
class LongerThan:
    def __init__(self, least: int) -> None:
        self.least = least

    def __call__(self, texts: list[str]) -> list[float]:
        return [float(len(text) > self.least) for text in texts]


def test_registered_rewards_are_taken_by_name_with_their_options() -> None:
    texts = ["a", "bbb"]
    assert verl.Reward("test_short").get_reward(texts)["reward"] == [-1.0, -3.0]
    longer = make_reward("test_longer_than", least=2, timeout=7.0)
    assert (longer.name, longer.timeout) == ("test_longer_than", 7.0)  # type: ignore[attr-defined]
    both = {"one": "test_short", "two": {"source": "test_longer_than", "weight": 10, "least": 2}}
    assert verl.Reward(both).get_reward(texts)["reward"] == [-1.0, 7.0]
    assert build_config({"actor_rollout_ref": {"model": {"path": "m"}}, "data": {"train": "x.jsonl"},
                         "reward": {"name": "test_short"}}).reward.name == "test_short"  # fmt: skip


def test_wrong_names_and_options_of_registered_rewards_are_told() -> None:
    for name, words in (("test_short", "taken by .*short"), ("task", "a built-in reward")):
        with pytest.raises(ConfigError, match=words):
            verl.register_reward(name)(lambda texts: [0.0])
    with pytest.raises(ConfigError, match=r"'test_longer_than'.*least"):
        make_reward("test_longer_than")
    with pytest.raises(ConfigError, match="no option 'lest'"):
        make_reward("test_longer_than", least=1, lest=2)
    with pytest.raises(ConfigError, match="did you mean 'test_short'"):
        make_reward("test_shor")
