from __future__ import annotations

import json
from typing import Any

import pytest

import verl
from verl.batch import Batch
from verl.errors import CheckpointError, ConfigError
from verl.rewards.composite import CompositeReward
from verl.rewards.make import make_reward
from verl.rewards.source import RewardResult, RewardSource, run_reward

SAMPLES = Batch.from_rows([{"prompt": "p", "response": "x" * n, "response_tokens": [0] * n} for n in (1, 2, 3)])


def length(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


def odd(texts: list[str]) -> list[float | None]:
    return [1.0 if len(text) % 2 else None for text in texts]


def test_weighted_sum_and_components() -> None:
    result = run_reward(make_reward({"length": (length, 0.5), "penalty": {"source": length, "weight": -1}}), SAMPLES)
    assert result.reward == [-0.5, -1.0, -1.5]
    assert result.components == {"length": [1.0, 2.0, 3.0], "penalty": [1.0, 2.0, 3.0]}
    assert result.as_batch().columns == ["reward", "abstain_reason", "reward/length", "reward/penalty"]


def test_lists_are_named_after_their_functions() -> None:
    source = make_reward([length, length, odd], weights=[1, 10, 100])
    assert isinstance(source, CompositeReward)
    assert source.weights == {"length": 1.0, "length_2": 10.0, "odd": 100.0}
    assert run_reward(source, SAMPLES).reward == [111.0, None, 133.0]


def test_the_rule_of_abstention() -> None:
    strict = run_reward(make_reward({"a": length, "b": odd}), SAMPLES)
    assert strict.reward == [2.0, None, 4.0]
    assert strict.reasons == [None, "b: the function abstained (None)", None]
    assert run_reward(make_reward({"a": length, "b": odd}, partial=True), SAMPLES).reward == [2.0, 2.0, 4.0]
    assert run_reward(make_reward({"b": odd, "c": odd}, partial=True), SAMPLES).reward == [2.0, None, 2.0]


@pytest.mark.parametrize("options", [{"smoothing": 0.5}, {}], ids=["smoothed", "composed"])
def test_two_components_of_one_name_are_refused(options: dict[str, float]) -> None:
    def detailed(texts: list[str]) -> list[dict[str, float]]:
        return [{"score": 1.0, "raw": 2.0} for _ in texts]

    source = make_reward(detailed if options else {"a": detailed, "a/raw": length}, **options)
    with pytest.raises(ConfigError, match=r"a component of reward '.*' is called '(a/)?raw', and another one is, too"):
        run_reward(source, SAMPLES)


def test_nested_components_and_options_reach_the_parts() -> None:
    def detailed(texts: list[str]) -> list[dict[str, float]]:
        return [{"score": float(len(text)), "even": float(len(text) % 2 == 0)} for text in texts]

    def fails(texts: list[str]) -> list[float]:
        raise ValueError

    source = make_reward({"x": {"y": detailed}, "z": fails}, default_reward=10.0)
    result = run_reward(source, SAMPLES)
    assert result.reward == [11.0, 12.0, 13.0]
    assert result.components["x/y/even"] == [0.0, 1.0, 0.0]
    assert all(str(reason).startswith("z: raised ValueError") for reason in result.reasons)


def test_whole_batch_is_asked_of_the_parts() -> None:
    def by_row(solution_str: str) -> float:
        return 1.0

    assert not make_reward([by_row, length]).whole_batch
    assert make_reward([by_row, make_reward(length, whole_batch=True)]).whole_batch


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        ({"a": length}, {"weights": {"b": 1.0}}, "weights: there is no reward 'b'"),
        ([length], {"weights": [1, 2]}, "2 weights for 1 rewards"),
        ({"a": (length, float("nan"))}, {}, "reward 'a'.weight: must be a number, not nan"),
        ([length, odd], {"weights": [1, float("-inf")]}, "CompositeReward.weights: must be a finite number, not -inf"),
        ({"a": length}, {"timeot": 1}, "did you mean 'timeout'"),
    ],
)
def test_wrong_compositions(parts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_reward(parts, **options)


def test_smoothing_is_a_moving_average_that_resumes() -> None:
    numbers = [[2.0, 4.0, None], [9.0, None, None], [None, None, None], [5.0, 5.0, 5.0]]

    def make() -> tuple[Any, list[list[float | None]]]:
        left = [list(row) for row in numbers]
        return make_reward(lambda texts: left.pop(0), smoothing=0.5), left

    source, _ = make()
    results = [run_reward(source, SAMPLES) for _ in range(3)]
    assert results[0].reward == [2.5, 3.5, None]  # mean 3
    assert results[1].reward == [7.5, None, None]  # mean 3/2 + 9/2 = 6
    assert results[2].reward == [None, None, None]
    assert results[1].components["raw"] == [9.0, None, None]
    state = json.loads(json.dumps(verl.Reward(source).state_dict()))
    resumed, left = make()
    del left[:3]
    verl.Reward(resumed).load_state_dict(state)
    assert run_reward(resumed, SAMPLES).reward == [5.25] * 3  # mean 5.5
    nested = make_reward({"a": source})
    assert isinstance(nested, CompositeReward)
    assert verl.Reward(nested).state_dict() == {"reward/a": state["reward"]}
    with pytest.raises(ConfigError, match="decay"):
        make_reward(length, smoothing=1.0)


def test_smoothing_is_for_a_part_too_and_all_means_resume() -> None:
    def make() -> RewardSource:
        return make_reward({"a": {"source": length, "smoothing": 0.5}, "b": length}, smoothing=0.5)

    source, resumed = make(), make()
    more = Batch.from_rows([{"prompt": "p", "response": "x" * 9}])
    assert run_reward(source, SAMPLES).reward == [3.25, 4.0, 4.75]  # of 1.5 + 1, 2 + 2 and 2.5 + 3
    verl.Reward(resumed).load_state_dict(json.loads(json.dumps(verl.Reward(source).state_dict())))
    assert run_reward(resumed, more).reward == run_reward(source, more).reward != run_reward(make(), more).reward


def test_a_state_of_other_smoothing_is_refused() -> None:
    smoothed = make_reward(length, smoothing=0.5)
    part = make_reward({"a": {"source": length, "smoothing": 0.5}, "b": length})
    for source, state, words in (
        (smoothed, {}, r"are \['reward'\] here and were none"),
        (part, {}, r"are \['reward/a'\] here and were none"),
        (part, {"reward": {"mean": 1.0}}, r"are \['reward/a'\] here and were \['reward'\]"),
        (make_reward({"a": length, "b": length}), {"reward": {"mean": 1.0}}, r"are none here and were \['reward'\]"),
    ):
        with pytest.raises(CheckpointError, match=words):
            verl.Reward(source).load_state_dict(state)


def test_a_users_own_source_passes_through() -> None:
    class Mine:
        name = "mine"
        whole_batch = False

        async def score(self, batch: Batch) -> RewardResult:
            return RewardResult([1.0] * len(batch))

    source = Mine()
    assert isinstance(source, RewardSource)
    assert make_reward(source) is source
    assert run_reward(make_reward({"a": (source, 2.0)}), SAMPLES).reward == [2.0] * 3
    with pytest.raises(ConfigError, match="made already"):
        make_reward(source, timeout=3)
