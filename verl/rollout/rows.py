"""Episodes as rows: one for each of their trajectories."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pyarrow as pa

from verl.batch import Batch
from verl.rollout.turns import Outcome, Turns, response_columns


def episode_rows(prompts: Batch, outcomes: Sequence[Outcome], version: int, is_double: bool = False) -> Batch:
    """The rows of finished episodes: one a trajectory, and of an episode that failed one without tokens.

    A row has the columns of its prompt and its response, and of its episode

        episode           the id of its prompt's row, which the first trajectory has, too
        episode_error     why it has no response, or null; left_out: the same in a word
        episode_reward    what the episode itself says, or null
        truncated         whether it was cut short
        calls_left_out    JSON: how many turns are in no trajectory, by reason
        rejected          responses thrown away before this one

    and, where one of these episodes has it, of its trajectory

        trajectory, trajectory_reward    its name and its own reward, or null
        conversation      its messages as JSON, or null
        call_rewards      [float] rewards of single turns, each at its last token
        other_calls       JSON: how many requests of its episode other models answered, by name, or null
        token_versions    [int64] where weights changed between its turns, or a grammar forced tokens: the version that
                          wrote each token; -1: none

    Args:
        outcomes: one for each of the prompts.
        version: of the engine's weights.
    """
    nothing = Turns(finish="abort", policy_version=version)
    episodes = [list(outcome.responses) or [nothing] for outcome in outcomes]
    turns, sizes, ids = [*chain(*episodes)], [*map(len, episodes)], prompts["id"]

    def of_episode(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
        return pa.array([value for value, size in zip(values, sizes, strict=True) for _ in range(size)], kind)

    calls_left_out = [_first(dict(turn.calls_left_out) or None for turn in each) or {} for each in episodes]
    columns = response_columns(turns, is_double) | {
        "id": [f"{id_}.{i}" if i else id_ for id_, size in zip(ids, sizes, strict=True) for i in range(size)],
        "episode": of_episode(ids, pa.string()),
        "episode_error": of_episode([outcome.error for outcome in outcomes], pa.string()),
        "left_out": of_episode([outcome.reason for outcome in outcomes], pa.string()),
        "episode_reward": of_episode([_first(turn.reward for turn in each) for each in episodes], pa.float64()),
        "truncated": of_episode([any(turn.truncated for turn in each) for each in episodes], pa.bool_()),
        "calls_left_out": of_episode([*map(json.dumps, calls_left_out)], pa.string()),
        "rejected": [turn.rejected for turn in turns],
        **_of_some(turns, is_double),
    }
    rows = prompts.take(of_episode(range(len(prompts)), pa.int64()).to_pylist())
    if any(turn.prompt_tokens for turn in turns):  # of agents that make prompts of their own
        usual = rows["prompt_tokens"]
        columns["prompt_tokens"] = [turn.prompt_tokens or tokens for turn, tokens in zip(turns, usual, strict=True)]
    return rows.drop(columns).add(columns)


def _of_some(turns: Sequence[Turns], is_double: bool) -> dict[str, pa.Array]:
    maybe: dict[str, tuple[Sequence[Any], pa.DataType]] = {
        "trajectory": ([turn.name or None for turn in turns], pa.string()),
        "trajectory_reward": ([turn.own_reward for turn in turns], pa.float64()),
        "conversation": ([json.dumps(turn.messages) if turn.messages else None for turn in turns], pa.string()),
        "other_calls": ([json.dumps(turn.other_calls) if turn.other_calls else None for turn in turns], pa.string()),
    }
    columns = {name: pa.array(*column) for name, column in maybe.items() if _first(column[0]) is not None}
    if any(turn.call_rewards for turn in turns):
        at_calls = [[turn.call_rewards.get(i, 0.0) for i in range(len(turn.response_tokens))] for turn in turns]
        columns["call_rewards"] = pa.array(at_calls, pa.large_list(pa.float64() if is_double else pa.float32()))
    # What a grammar forced was written, too, and has mask 0.
    forced = any(sum(v >= 0 for v in turn.token_versions) > sum(turn.response_mask) for turn in turns)
    if forced or any(len({*turn.token_versions} - {-1}) > 1 for turn in turns):
        versions = [
            turn.token_versions or [turn.policy_version if mask else -1 for mask in turn.response_mask]
            for turn in turns
        ]
        columns["token_versions"] = pa.array(versions, pa.large_list(pa.int64()))
    return columns


def _first(values: Any) -> Any:
    return next((value for value in values if value is not None), None)
