"""Responses turn by turn, as the columns of their rows, and episodes as rows, one for each of their trajectories."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pyarrow as pa

from verl.batch import Batch
from verl.rollout.base import Finish, Sample


@dataclass
class Turns:
    """One response, turn by turn, as the columns of its row, which are aligned. An episode may return several, its
    trajectories, each with a prompt of its own.

    Attributes:
        rejected: number of responses that were discarded before this one.
        temperatures: those at which the policy sampled.
        prompt_tokens: in place of the row's; None: they are the row's.
        name: of the trajectory, such as the name of a sub-agent.
        own_reward: of this trajectory alone, which is then compared with others of its name, not with the episodes.
        call_rewards: of single turns, by the position of their last token in the response.
        messages: the conversation, for rewards to read.
        reward: of the episode, where it says one itself; the same in all of its trajectories, or in one.
        truncated: whether the episode was cut short, by a bound or by the model's context; so in one of them.
        calls_left_out: how many turns of the episode are in none of its trajectories, by reason; in one of them.
        other_calls: how many requests of the episode other models answered, by their names; in one of them.
        token_versions: for each token, the policy version that began its turn; -1: it was read.
    """

    response_tokens: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    finish: Finish = "stop"
    policy_version: int = 0
    rejected: int = 0
    temperatures: set[float] = field(default_factory=set)
    prompt_tokens: list[int] | None = None
    name: str = ""
    own_reward: float | None = None
    call_rewards: dict[int, float] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] | None = None
    reward: float | None = None
    truncated: bool = False
    calls_left_out: Mapping[str, int] = field(default_factory=dict)
    other_calls: Mapping[str, int] = field(default_factory=dict)
    token_versions: list[int] = field(default_factory=list)

    def wrote(self, sample: Sample, reward: float | None = None, forced: Sequence[bool] = ()) -> Turns:
        """Append what the policy sampled, and its own reward; `policy_version` is the oldest of all turns.

        Args:
            forced: for each token, whether a grammar allowed no other, so that it is not trained; empty: for none.
        """
        first = max(self.token_versions, default=-1) < 0
        self.policy_version = sample.policy_version if first else min(self.policy_version, sample.policy_version)
        mask = [int(not only) for only in forced] or [1] * len(sample.tokens)
        self.response_tokens += sample.tokens
        self.response_mask += mask
        self.rollout_log_probs += [p if m else 0.0 for p, m in zip(sample.log_probs, mask, strict=True)]
        self.token_versions += [sample.policy_version] * len(sample.tokens)
        if reward is not None and sample.tokens:
            self.call_rewards[len(self.response_tokens) - 1] = reward
        self.finish = sample.finish
        if sample.temperature is not None:
            self.temperatures.add(sample.temperature)
        return self

    def read(self, tokens: Sequence[int]) -> Turns:
        """Append tokens that the policy did not sample."""
        self.response_tokens += tokens
        self.response_mask += [0] * len(tokens)
        self.rollout_log_probs += [0.0] * len(tokens)
        self.token_versions += [-1] * len(tokens)
        return self


def response_columns(turns: Sequence[Turns], is_double: bool = False) -> dict[str, Any]:
    """The columns of finished responses. Their log-probs stay in fp64 if `is_double`; else they become fp32."""
    names = ("response_tokens", "response_mask", "rollout_log_probs", "finish", "policy_version")
    columns: dict[str, Any] = {name: [getattr(turn, name) for turn in turns] for name in names}
    if is_double:  # lists of a batch are fp32
        columns["rollout_log_probs"] = pa.array(columns["rollout_log_probs"], pa.large_list(pa.float64()))
    return columns


@dataclass(frozen=True)
class Outcome:
    """The responses of the row `index`, or an error with its reason in a word."""

    index: int
    responses: Sequence[Turns]
    error: str | None = None
    reason: str | None = None


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
