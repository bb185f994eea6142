"""What episodes mean, in the slowest way: advantage, weight and loss of each token, from docs/episodes.md alone.

An episode answers one prompt once. Its trajectories are conversations, as tokens that were sampled or read. Nothing
here knows of tensors, rows or batches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Token:
    """`reward` is of the call that ends here; `old` and `new` are log-probs; only sampled tokens are trained."""

    id: int
    sampled: bool
    old: float = 0.0
    new: float = 0.0
    reward: float = 0.0


@dataclass
class Trajectory:
    tokens: list[Token]
    name: str = ""
    reward: float | None = None

    @property
    def trained(self) -> list[Token]:
        return [token for token in self.tokens if token.sampled]


@dataclass
class Episode:
    """`reward` None: it is left out."""

    id: str
    group: str
    reward: float | None
    trajectories: list[Trajectory] = field(default_factory=list)

    @property
    def trained(self) -> list[Token]:
        return [token for trajectory in self.trajectories for token in trajectory.trained]


@dataclass(frozen=True)
class Value:
    """What an estimator is told of an episode: one number, and how many tokens the policy wrote for it."""

    reward: float
    tokens: int


def names(episode: Episode) -> list[str | None]:
    """What of it is compared: None is the episode itself, others are sub-agents with rewards of their own."""
    return [*dict.fromkeys([None, *(t.name for t in episode.trajectories if t.reward is not None)])]


def members(episode: Episode, name: str | None) -> list[Trajectory]:
    if name is None:
        return [t for t in episode.trajectories if t.reward is None]
    return [t for t in episode.trajectories if t.reward is not None and t.name == name]


def value(episode: Episode, name: str | None) -> Value:
    parts, own = members(episode, name), episode.reward
    calls = [sum(token.reward for token in t.tokens) for t in parts]
    tokens = sum(len(t.trained) for t in parts)
    assert own is not None
    if name is None:
        return Value(own + sum(calls), tokens)
    return Value(statistics.mean((t.reward or 0.0) + call for t, call in zip(parts, calls, strict=True)), tokens)


def compared(episodes: Sequence[Episode]) -> dict[tuple[str, str | None], list[str]]:
    """For each prompt and name the episodes that are compared with each other: those that count, without prompts that
    were to have several episodes and have fewer than two that do."""
    groups: dict[tuple[str, str | None], list[str]] = {}
    for episode in episodes:
        if episode.reward is not None:
            for name in names(episode):
                groups.setdefault((episode.group, name), []).append(episode.id)
    return {key: ids for key, ids in groups.items() if len(groups[key[0], None]) > 1 or planned(key[0], episodes) == 1}


def planned(group: str, episodes: Sequence[Episode]) -> int:
    return sum(episode.group == group for episode in episodes)


def estimate(algorithm: str, values: Sequence[Value]) -> list[float]:
    """The advantage of each of a group."""
    rewards = [v.reward for v in values]
    if len(rewards) == 1:
        scale = 1 + 1e-6 if algorithm in ("grpo", "gspo") else 1.0  # of no deviation that there could be
        return [0.0] if algorithm == "grpo_passk" else [rewards[0] / scale]
    mean, deviation = statistics.mean(rewards), statistics.stdev(rewards) + 1e-6
    if min(rewards) == max(rewards):
        return [0.0 for _ in rewards]
    if algorithm in ("grpo", "gspo"):
        return [(reward - mean) / deviation for reward in rewards]
    if algorithm == "rloo":
        return [reward - (sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]
    if algorithm == "opo":
        tokens = sum(v.tokens for v in values)
        return [reward - sum(v.tokens * v.reward for v in values) / max(tokens, 1) for reward in rewards]
    if algorithm == "grpo_passk":
        second, best = sorted(rewards)[-2:]
        winner = rewards.index(best)
        return [(best - second) / deviation if i == winner else 0.0 for i in range(len(rewards))]
    return [reward - mean for reward in rewards]  # dr_grpo, gpg, reinforce_plus_plus_baseline


def advantages(algorithm: str, episodes: Sequence[Episode]) -> dict[tuple[str, int], float]:
    """Of each trained token that counts, by its episode and id."""
    by_id = {episode.id: episode for episode in episodes}
    result: dict[tuple[str, int], float] = {}
    every: list[float] = []
    for (group, name), ids in compared(episodes).items():
        values = [value(by_id[id_], name) for id_ in ids]
        every += [v.reward for v in values]
        if len(ids) == 1 and planned(group, episodes) > 1:
            continue  # the only one of its name has nothing to be compared with
        for id_, advantage in zip(ids, estimate(algorithm, values), strict=True):
            for trajectory in members(by_id[id_], name):
                result |= {(id_, token.id): advantage for token in trajectory.trained}
    if algorithm == "gpg":
        scale = len(every) / max(sum(reward != 0 for reward in every), 1)
        return {key: scale * advantage for key, advantage in result.items()}
    if algorithm == "reinforce_plus_plus_baseline" and result:
        numbers = [*result.values()]
        variance = statistics.variance(numbers) if len(numbers) > 1 else 0.0
        mean = statistics.mean(numbers)
        return {key: (advantage - mean) / math.sqrt(variance + 1e-8) for key, advantage in result.items()}
    return result


def weights(mode: str, episodes: Sequence[Episode], counted: Sequence[tuple[str, int]]) -> dict[tuple[str, int], float]:
    """What the loss of each token that counts is multiplied with. A sequence is an episode: all of its tokens."""
    sizes: dict[str, int] = {}
    for id_, _ in counted:
        sizes[id_] = sizes.get(id_, 0) + 1
    tokens, sequences, longest = len(counted), len(sizes), max(sizes.values(), default=1)
    of_token = {
        "token-mean": lambda id_: 1 / tokens,
        "token-sum": lambda id_: 1.0,
        "seq-mean-token-sum": lambda id_: 1 / sequences,
        "seq-mean-token-mean": lambda id_: 1 / (sequences * sizes[id_]),
        "seq-mean-token-sum-norm": lambda id_: 1 / (sequences * longest),
    }[mode]
    return {key: of_token(key[0]) for key in counted}


def loss(algorithm: str, mode: str, episodes: Sequence[Episode]) -> float:
    """PPO's clipped loss, of GSPO with one ratio a trajectory; of GPG without a ratio."""
    advantage = advantages(algorithm, episodes)
    weight = weights(mode, episodes, [*advantage])
    total = 0.0
    for episode in episodes:
        for trajectory in episode.trajectories:
            for token in trajectory.trained:
                if (key := (episode.id, token.id)) in advantage:
                    total += weight[key] * token_loss(algorithm, advantage[key], token, trajectory)
    return total


def token_loss(algorithm: str, advantage: float, token: Token, trajectory: Trajectory) -> float:
    if algorithm == "gpg":
        return -advantage * token.new
    low, high, difference = 0.2, 0.2, token.new - token.old
    if algorithm == "gspo":
        low, high = 3e-4, 4e-4
        difference = statistics.mean(token.new - token.old for token in trajectory.trained)
    ratio = math.exp(difference)
    result = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(result, -3 * advantage) if advantage < 0 and algorithm != "gspo" else result


def discounted(episode: Episode, gamma: float) -> dict[tuple[str, int], float]:
    """Rewards to go along each trajectory: those of calls at their last token, and the episode's, or the trajectory's
    own, at the last of all."""
    result = {}
    for trajectory in episode.trajectories:
        end = episode.reward if trajectory.reward is None else trajectory.reward
        running = 0.0
        for token in reversed(trajectory.trained):
            running = token.reward + (end or 0.0) + gamma * running
            end = 0.0
            result[episode.id, token.id] = running
    return result
