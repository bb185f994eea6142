"""Rewards that are equal by arithmetic compare as equal, whatever the order in which their parts were added."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import verl
from tests.properties import examples
from verl.algorithms.advantages import group_equal
from verl.data.loader import PromptLoader
from verl.data.prompts import load_prompts
from verl.dataflow.scores import score_metrics
from verl.rewards.environments import EnvironmentReward
from verl.rewards.make import make_reward
from verl.rewards.scores import read_score, rounded
from verl.rewards.source import run_reward

ONE = verl.Batch.from_rows([{"prompt": "p", "response": "x"}])
TENTHS = st.integers(-10_000, 10_000)


def constant(value: float) -> Callable[[list[str]], list[float]]:
    def part(texts: list[str]) -> list[float]:
        return [value] * len(texts)

    return part


def total(values: list[float], weights: list[float]) -> float | None:
    parts = {f"part{number}": constant(value) for number, value in enumerate(values)}
    return run_reward(make_reward(parts, weights=weights, process=False), ONE).reward[0]


@pytest.mark.parametrize(
    ("terms", "wanted"),
    [
        ([0.7, 0.2, 0.1], 1.0),
        ([0.1, 0.2], 0.3),
        ([0.7, 0.2, -0.9], 0.0),
        ([1e9, 0.1, -1e9], 0.1),
        ([1e-20, 2e-20], 3e-20),
    ],
)
def test_weighted_parts_sum_to_what_they_are_by_arithmetic(terms: list[float], wanted: float) -> None:
    for order in itertools.permutations(terms):
        assert total([1.0] * len(terms), list(order)) == wanted, order


@given(st.lists(st.tuples(TENTHS, TENTHS), min_size=1, max_size=6))
@examples(40)
def test_sums_of_decimals_are_those_of_fractions(pairs: list[tuple[int, int]]) -> None:
    found = total([value / 1000 for value, _ in pairs], [weight / 1000 for _, weight in pairs])
    assert found == float(sum(Fraction(value * weight, 1_000_000) for value, weight in pairs))


def test_what_a_function_returns_is_the_decimal_that_was_meant() -> None:
    assert read_score(0.1 + 0.2).value == 0.3 and read_score(0.7 + 0.2 + 0.1).value == 1.0
    assert read_score({"score": 1.1 * 3, "part": 0.1 + 0.2}).components == {"part": 0.3}
    for number in (0.0, -0.0, 1e-300, 5e-324, -123456.789, 3.4e38, 1 / 3, math.pi, 0.1 + 1e-10, 0.5041666666666667):
        assert rounded(number) == number, "it is no decimal of nine digits, or exactly that"
    assert rounded(1e-13) == 1e-13  # digits, not places: a small reward is a reward
    environment = verl.Batch.from_rows([{"episode_reward": 0.1 + 0.2}, {"episode_reward": 0.3}])
    assert run_reward(EnvironmentReward("shop"), environment).reward == [0.3, 0.3]


def test_groups_that_are_alike_by_arithmetic_are_alike() -> None:
    def score(texts: list[str]) -> list[float]:
        return [0.1 + 0.2 if text == "a" else 0.3 for text in texts]

    batch = verl.Batch.from_rows([{"group": "g", "prompt": "p", "response": text} for text in "ab"])
    scored = batch.add({"reward": verl.Reward(score, process=False).get_reward(batch)["reward"]})
    assert score_metrics(scored)["reward/groups_alike"] == 1.0


def test_a_group_is_alike_but_for_the_rounding_of_its_sums() -> None:
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    values = torch.tensor([0.1 + 0.2, 0.3, 1.0, 1.0 + 1e-9, -(0.7 + 0.2 + 0.1), -1.0, 1.0], dtype=torch.float64)
    assert group_equal(values, groups).tolist() == [True, True, False, False, True, True, False]
    assert group_equal(torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.long)).all()


def test_dapos_filter_drops_a_group_that_is_alike_by_arithmetic() -> None:
    algorithm: Any = verl.algorithms.make_algorithm("dapo", filter_groups=True)
    tokens = [[1, 2, 3]] * 2
    batch = verl.Batch.from_columns(
        {"group": ["g", "g"], "id": ["a", "b"], "prompt_tokens": [[1]] * 2, "response_tokens": tokens,
         "response_mask": [[1, 1, 1]] * 2, "reward": [0.1 + 0.2, 0.3]}
    )  # fmt: skip
    assert algorithm.keep(batch) == [False, False]


@pytest.mark.slow
def test_pools_count_a_prompt_as_solved_by_the_sum_of_its_parts(tiny: Path) -> None:
    def right(responses: list[str], prompts: list[Any], k: list[int]) -> list[float]:
        return [1.0 if number % 2 == 0 else float(place % 2) for place, number in enumerate(k)]

    loader = PromptLoader(
        load_prompts([{"prompt": f"say {i}", "k": i} for i in range(8)]), 4, pools={"solved": 0.01}, seed=0
    )
    reward = verl.Reward({"a": right, "b": right, "c": right}, weights=[0.7, 0.2, 0.1], process=False)
    trainer = verl.Trainer(
        verl.Actor(str(tiny), sampling={"max_new_tokens": 4}), reward=reward, algorithm="grpo", n=2, log_dir=False
    )
    assert trainer.fit(loader, 2)["pools/solved"] == 4
