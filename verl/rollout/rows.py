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
    turns, ids = [*chain(*episodes)], prompts["id"]
    parents = [index for index, each in enumerate(episodes) for _ in each]
    rewards = [next((turn.reward for turn in each if turn.reward is not None), None) for each in episodes]
    calls_left_out = [next((turn.calls_left_out for turn in each if turn.calls_left_out), {}) for each in episodes]
    of_episodes = {
        "episode": pa.array(ids, pa.string()),
        "episode_error": pa.array([outcome.error for outcome in outcomes], pa.string()),
        "left_out": pa.array([outcome.reason for outcome in outcomes], pa.string()),
        "episode_reward": pa.array(rewards, pa.float64()),
        "truncated": pa.array([any(turn.truncated for turn in each) for each in episodes], pa.bool_()),
        "calls_left_out": pa.array([json.dumps(dict(calls)) for calls in calls_left_out], pa.string()),
    }
    columns = response_columns(turns, is_double) | {
        "id": [f"{id_}.{i}" if i else id_ for id_, each in zip(ids, episodes, strict=True) for i in range(len(each))],
        **{name: column.take(pa.array(parents, pa.int64())) for name, column in of_episodes.items()},
        "rejected": [turn.rejected for turn in turns],
        **_of_some(turns, is_double),
    }
    rows = prompts.take(parents)
    if any(turn.prompt_tokens for turn in turns):  # of agents that make prompts of their own
        usual = rows["prompt_tokens"]
        columns["prompt_tokens"] = [turn.prompt_tokens or tokens for turn, tokens in zip(turns, usual, strict=True)]
    return rows.drop(columns).add(columns)


def _of_some(turns: Sequence[Turns], is_double: bool) -> dict[str, Any]:
    maybe = {
        "trajectory": pa.array([turn.name or None for turn in turns]),
        "trajectory_reward": pa.array([turn.own_reward for turn in turns], pa.float64()),
        "conversation": pa.array([json.dumps(turn.messages) if turn.messages else None for turn in turns]),
        "other_calls": pa.array([json.dumps(turn.other_calls) if turn.other_calls else None for turn in turns]),
    }
    columns: dict[str, Any] = {name: column for name, column in maybe.items() if column.null_count < len(column)}
    if any(turn.call_rewards for turn in turns):
        at_calls = [[turn.call_rewards.get(i, 0.0) for i in range(len(turn.response_tokens))] for turn in turns]
        columns["call_rewards"] = pa.array(at_calls, pa.large_list(pa.float64() if is_double else pa.float32()))
    # What a grammar forced was written, too, and has mask 0.
    forced = any(sum(v >= 0 for v in turn.token_versions) > sum(turn.response_mask) for turn in turns)
    if forced or any(len({*turn.token_versions} - {-1}) > 1 for turn in turns):
        columns["token_versions"] = [
            turn.token_versions or [turn.policy_version if mask else -1 for mask in turn.response_mask]
            for turn in turns
        ]
    return columns
