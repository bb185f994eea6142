"""Advantage estimators: pure functions on whole-batch tensors (fp64, detached).

Shapes: R response tokens, S rows. `rewards` `[S]` is one outcome a row, `groups` `[S]` the number of its group
(its prompt). Defined for every input: a group of one has baseline 0, so its advantage is its reward
(plain REINFORCE); a group whose rewards are all equal has advantage exactly 0; no rows, or rows without
tokens, are fine. Rows that abstained never come here.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from verl._base.autograd import sum_rows
from verl.algorithms.responses import Responses

#: Added to a group's standard deviation.
STD_EPSILON = 1e-6


def group_sums(values: Tensor, groups: Tensor) -> Tensor:
    """`[S]` -> `[S]`: for each row the sum over its group."""
    return sum_rows(values, groups, int(groups.max()) + 1 if len(groups) else 0)[groups]


def group_sizes(groups: Tensor) -> Tensor:
    """`[S]` fp64: for each row the rows of its group."""
    return group_sums(torch.ones(len(groups), dtype=torch.float64), groups)


def group_equal(values: Tensor, groups: Tensor) -> Tensor:
    """`[S]` bool: the row's group has more than one row, and the same value in all of them, but for the rounding of a
    sum (of token rewards, or a reward and a punishment)."""
    if not len(groups):
        return torch.zeros(0, dtype=torch.bool)
    number = int(groups.max()) + 1
    highest = values.new_full((number,), -torch.inf).scatter_reduce(0, groups, values, "amax")
    lowest = values.new_full((number,), torch.inf).scatter_reduce(0, groups, values, "amin")
    same = highest - lowest <= 1e-12 * torch.maximum(highest.abs(), lowest.abs())
    return same[groups] & (group_sizes(groups) > 1)


def group_centred(rewards: Tensor, groups: Tensor) -> Tensor:
    """`[S]`: reward minus the mean of its group; in a group of one, the reward."""
    sizes = group_sizes(groups)
    mean = torch.where(sizes > 1, group_sums(rewards, groups) / sizes, 0.0)
    # Equal rewards must give exactly zero: a rounding error divided by a tiny deviation is no signal.
    return torch.where(group_equal(rewards, groups), 0.0, rewards - mean)


def group_std(rewards: Tensor, groups: Tensor) -> Tensor:
    """`[S]`: sample standard deviation of the row's group; 1 in a group of one."""
    sizes = group_sizes(groups)
    squares = (rewards - group_sums(rewards, groups) / sizes).square()
    variance = group_sums(squares, groups) / (sizes - 1).clamp(min=1)
    return torch.where(sizes > 1, variance.sqrt(), 1.0)


def grpo(
    rewards: Tensor, groups: Tensor, norm_adv_by_std: bool | Literal["batch"], std_epsilon: float = STD_EPSILON
) -> Tensor:
    """GRPO (arXiv:2402.03300, section 4.1.2): centred in the group, divided by its sample standard deviation; with
    "batch", the deviation of all rewards (arXiv:2508.08221)."""
    centred = group_centred(rewards, groups)
    if not norm_adv_by_std:
        return centred
    if norm_adv_by_std == "batch":
        return centred / ((rewards.std() if len(rewards) > 1 else 1.0) + std_epsilon)
    return centred / (group_std(rewards, groups) + std_epsilon)


def gae(token_rewards: Tensor, values: Tensor, responses: Responses, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, equation 16), not whitened.

    Tokens that the policy did not write are skipped: they pass the recursion on to the token before them.

    Args:
        token_rewards, values: `[R]`; `values` of the state before each token.

    Returns:
        advantages, returns: `[R]`; a token that was not written repeats the next written one.
    """
    # Backwards over padded rows: a token that was not written keeps the numbers of its successor, so it is skipped.
    rewards_SL, values_SL = responses.pad(token_rewards), responses.pad(values)
    written_SL = responses.pad(responses.written)
    advantages_SL = torch.zeros_like(values_SL)
    next_value = advantage = values_SL.new_zeros(responses.rows)
    for t in reversed(range(values_SL.shape[1])):
        delta = rewards_SL[:, t] + gamma * next_value - values_SL[:, t]
        advantage = torch.where(written_SL[:, t], delta + gamma * lam * advantage, advantage)
        next_value = torch.where(written_SL[:, t], values_SL[:, t], next_value)
        advantages_SL[:, t] = advantage
    advantages = advantages_SL[responses.sequence, responses.position]
    return advantages, advantages + values


def discounted_returns(token_rewards: Tensor, responses: Responses, gamma: float = 1.0) -> Tensor:
    """`[R]`: rewards to go; 0 on tokens that the policy did not write, which the discount skips."""
    returns, _ = gae(token_rewards, torch.zeros_like(token_rewards), responses, gamma, lam=1.0)
    return torch.where(responses.written, returns, 0.0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """`[R]`: to mean 0 and variance 1 over the tokens in `mask`; with one token 0, with none the input."""
    chosen = values[mask]
    if not len(chosen):
        return values
    variance = chosen.var(correction=1) if len(chosen) > 1 else chosen.new_zeros(())
    return (values - chosen.mean()) * (variance + 1e-8).rsqrt()
