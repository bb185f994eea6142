"""The episodes of a batch as estimators see them: one row each.

A row is a trajectory, and an episode may have several (`verl.rollout.turns`). Rewards are compared by episode: an
estimator gets one number of each, and every token of all its trajectories gets the same advantage. Trajectories with
a reward of their own (`trajectory_reward`) are separate: those with one name are taken as another episode, in a group
of that name.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from verl.algorithms.advantages import group_sizes
from verl.algorithms.responses import Responses
from verl.batch import Batch
from verl.errors import DataError


class Episodes:
    """Shapes: R response tokens of S rows, which are trajectories, of E episodes, separate ones included. Without a
    column `episode` each row is an episode.

    Attributes:
        rows: the batch, with the rows of an episode next to each other.
        batch: `[E]` rows, of the same tokens in the same order. `reward` has the rewards of single calls in it; of
            several trajectories with rewards of their own it is the mean. Other columns of rows are the first one's.
        number: `[S]` int64, the episode of each row of the batch that was given.
        whole: `[E]` int64, for a separate one the episode that it belongs to, else itself.
        trajectories, responses: of `rows` and of `batch`.
    """

    def __init__(self, batch: Batch) -> None:
        self.rows = self.batch = batch
        self.number = self.whole = torch.arange(len(batch))
        self.trajectories = self.responses = Responses(batch)
        self.are_rows = "episode" not in batch
        if self.are_rows:
            return
        members = _members(batch)
        for number, (_, rows) in enumerate(members):
            self.number[rows] = number
        order = [row for _, rows in members for row in rows]
        if order != sorted(order):
            self.rows = batch.take(order)
            self.trajectories = self.responses = Responses(self.rows)
        self._apart = [name for name, _ in members]
        wholes = torch.tensor([name is None for name in self._apart], dtype=torch.bool)
        self.whole = torch.where(wholes, torch.arange(len(members)), 0).cummax(0).values
        self._sizes = torch.tensor([len(rows) for _, rows in members], dtype=torch.int64)
        self._firsts: list[int] = (self._sizes.cumsum(0) - self._sizes).tolist()
        if len(members) != len(batch) or "trajectory_reward" in batch or "call_rewards" in batch:
            self.batch = self._merged()
            self.responses = Responses(self.batch)

    @property
    def planned(self) -> Tensor:
        """`[E]` fp64: the number of episodes of the same prompt, including those that do not count."""
        if self.are_rows:
            return group_sizes(self.responses.groups)
        of_group: dict[int, float] = {}
        for rows in self.rows.group_indices():
            count = float(len(self.rows.take(rows).group_indices("episode")))
            of_group |= dict.fromkeys(rows, count)
        return torch.tensor([of_group[row] for row in self._firsts], dtype=torch.float64)

    def count(self, chosen: Tensor) -> int:
        """How many episodes are `chosen`, `[E]` bool; the separate ones within one count once."""
        return int(chosen.sum()) if self.are_rows else len(self.batch.filter(chosen.tolist()).group_indices("episode"))

    def at_end(self, outcome: Tensor) -> Tensor:
        """`[E]` -> `[S]`: the reward at the end of each row of `rows`: the episode's outcome without the rewards of
        its calls, or the trajectory's own."""
        if self.batch is self.rows:
            return outcome
        return self.spread(outcome) + self._own_rewards - self.spread(self.batch.tensor("reward", torch.float64))

    def spread(self, values: Tensor) -> Tensor:
        """`[E]` -> `[S]`: each episode's number at each row of `rows`."""
        return values if self.batch is self.rows else values.repeat_interleave(self._sizes)

    @property
    def at_calls(self) -> Tensor:
        """`[R]`: rewards of single calls, at tokens that the policy wrote."""
        if "call_rewards" not in self.rows:
            return torch.zeros(len(self.trajectories.sequence), dtype=torch.float64)
        sizes = zip(self.rows.lengths("call_rewards"), self.trajectories.lengths, strict=True)
        here = torch.tensor([size == length for size, length in sizes], dtype=torch.bool)[self.trajectories.sequence]
        values = torch.zeros(len(here), dtype=torch.float64)
        values[here] = self.rows.tensor("call_rewards", torch.float64)  # 0 in rows that have none
        return self.trajectories.at_written(values)

    @cached_property
    def _own_rewards(self) -> Tensor:
        """`[S]`: each trajectory's own reward, or the episode's. NaN where the episode has no reward."""
        rewards = self.rows.tensor("reward", torch.float64)
        if "trajectory_reward" not in self.rows:
            return rewards
        separate = self.rows.tensor("trajectory_reward", torch.float64)
        has_own = torch.tensor([reward is not None for reward in self.rows["trajectory_reward"]], dtype=torch.bool)
        return torch.where(has_own & rewards.isfinite(), separate, rewards)

    def _merged(self) -> Batch:
        lengths = self.rows.lengths("response_tokens")
        batch = self.rows.take(self._firsts)
        columns: dict[str, Any] = {}
        ends = [0, *accumulate(lengths)]
        offsets = [ends[first] for first in self._firsts] + ends[-1:]
        for name in self.rows.columns:
            values = self.rows.arrow(name)
            # The tokens of an episode are already adjacent: its columns only get coarser offsets.
            is_ragged = name != "prompt_tokens" and pa.types.is_large_list(values.type)
            if is_ragged and self.rows.lengths(name) == lengths:
                columns[name] = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values.flatten())
        if "group" in batch:
            groups = zip(batch["group"], self._apart, strict=True)
            columns["group"] = [group if name is None else f"{group}\0{name}" for group, name in groups]
        if "reward" in batch:
            columns["reward"] = self._rewards(batch.tensor("reward", torch.float64))
        return batch.drop(columns).add(columns)

    def _rewards(self, rewards: Tensor) -> Tensor:
        """`[E]` rewards, from the rewards of whole episodes."""
        number = torch.arange(len(self._sizes)).repeat_interleave(self._sizes)
        nothing, sizes = torch.zeros(len(self._sizes), dtype=torch.float64), self._sizes.clamp(min=1)
        is_apart = self.whole != torch.arange(len(sizes))
        rewards = torch.where(is_apart, nothing.index_add(0, number, self._own_rewards) / sizes, rewards)
        calls = nothing.index_add(0, number, self.trajectories.sum(self.at_calls))
        return rewards + torch.where(is_apart, calls / sizes, calls)


def one_trajectory(batch: Batch, algorithm: str) -> Batch:
    """The batch, for algorithms that compare whole responses.

    Raises:
        DataError: an episode has several.
    """
    if "episode" in batch and (several := [rows for rows in batch.group_indices("episode") if len(rows) > 1]):
        raise DataError(
            f"algorithm '{algorithm}' compares responses one with another, and episode "
            f"'{batch['episode'][several[0][0]]}' has {len(several[0])} trajectories: train agents that have one "
            "conversation, or choose an algorithm of rewards, such as grpo"
        )
    return batch


def _members(batch: Batch) -> list[tuple[str | None, list[int]]]:
    """The rows of each episode under None, which may be no row, followed by its separate ones by name."""
    rewards = batch["trajectory_reward"] if "trajectory_reward" in batch else [None] * len(batch)
    names = batch["trajectory"] if "trajectory" in batch else [None] * len(batch)
    members: list[tuple[str | None, list[int]]] = []
    for rows in batch.group_indices("episode"):
        parts: dict[str | None, list[int]] = {None: []}
        for row in rows:
            parts.setdefault(None if rewards[row] is None else names[row] or "", []).append(row)
        members += parts.items()
    return members
