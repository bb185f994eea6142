"""Responses turn by turn, as the columns of their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

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
