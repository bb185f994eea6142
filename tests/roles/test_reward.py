"""The handle of a reward: what it is made of, what it gives, what it carries over a restart."""

from __future__ import annotations

import asyncio

import pytest

import verl
from verl.errors import ConfigError

ROWS = verl.Batch.from_columns({"id": ["a", "b"], "response": ["xy", "xyz"], "response_tokens": [[1, 2], [1, 2, 3]]})


def lengths(texts: list[str]) -> list[float]:
    return [float(len(text)) for text in texts]


def second_fails(texts: list[str]) -> list[float]:
    return [1.0, float("nan")]


def test_scores_are_columns_aligned_with_the_samples() -> None:
    reward = verl.Reward(lengths)
    found = reward.get_reward(ROWS)
    assert found["reward"] == [2.0, 3.0] and found["abstain_reason"] == [None, None]
    assert asyncio.run(reward.score(ROWS))["reward"] == [2.0, 3.0]


def test_a_missing_score_abstains_unless_a_number_is_given() -> None:
    found = verl.Reward(second_fails).get_reward(ROWS)
    assert found["reward"] == [1.0, None] and found["abstain_reason"][1]
    assert verl.Reward(second_fails, default_reward=-1.0).get_reward(ROWS)["reward"] == [1.0, -1.0]


def test_it_is_made_of_one_thing() -> None:
    for wrong in ({}, {"reward_fn": lengths, "model": "somewhere"}):
        with pytest.raises(ConfigError, match="takes exactly one of"):
            verl.Reward(**wrong)
    with pytest.raises(ConfigError, match="no option 'timout': did you mean 'timeout'"):
        verl.Reward(lengths, timout=3.0)


def test_components_are_summed_and_shown() -> None:
    found = verl.Reward({"long": (lengths, 0.5), "given": (second_fails, 1.0)}).get_reward(ROWS)
    assert found["reward/long"] == [2.0, 3.0] and found["reward"][0] == 2.0


def test_a_running_average_is_carried_over() -> None:
    first, second = (verl.Reward(lengths, smoothing=0.5) for _ in range(2))
    first.get_reward(ROWS)
    second.load_state_dict(first.state_dict())
    assert first.state_dict() and second.get_reward(ROWS)["reward"] == first.get_reward(ROWS)["reward"]
    assert verl.Reward(lengths).state_dict() == {}


def test_rewards_are_parts_of_rewards() -> None:
    sequences = verl.Batch.from_columns({"response": ["a", "bc"]})
    length = verl.Reward(lambda texts: [len(text) for text in texts], smoothing=0.0)
    one = verl.Reward(lambda texts: [1.0] * len(texts))
    both = verl.Reward({"length": length, "one": (one, -0.5)}, timeout=5)
    assert both.get_reward(sequences)["reward"] == [0.5, 1.5]
    assert verl.Reward([length, one]).get_reward(sequences)["reward"] == [2.0, 3.0]
    assert verl.Reward(one).get_reward(sequences)["reward"] == [1.0, 1.0]
