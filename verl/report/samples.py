"""The samples of a step: what they are called, how far they are from the reference."""

from __future__ import annotations

import torch

from verl.algorithms.kl import kl_of_token
from verl.batch import Batch
from verl.dataflow.scores import Mean

_NAMES = ("id", "group", "episode")


def retried_groups(groups: list[str], round_: int, origin: dict[str, str]) -> list[str]:
    """New names for groups that are sampled again, which `origin` learns; a data set may have called a group so."""
    names = {}
    for group in dict.fromkeys(groups):
        name = f"{group}~{round_}"
        while name in origin:
            name += "~"
        names[group] = name
        origin[name] = group
    return [names[group] for group in groups]


def sample_names(samples: Batch) -> set[str]:
    return {name for column in _NAMES if column in samples for name in samples[column]}


def renamed(samples: Batch, taken: set[str]) -> Batch:
    """The samples under names that none of `taken` has, so that no groups of different prompts become one."""
    while not taken.isdisjoint(sample_names(samples)):
        names = {column: [name and f"~{name}" for name in samples[column]] for column in _NAMES if column in samples}
        samples = samples.drop(names).add(names)
    return samples


def permuted(samples: Batch, seed: int) -> Batch:
    """The samples with rewards and costs dealt out at random, among episodes where they are of those; the rewards of
    tokens, calls and single trajectories are left out."""
    episodes = samples.group_indices("episode")
    order = torch.randperm(len(episodes), generator=torch.Generator().manual_seed(seed)).tolist()
    source = [0] * len(samples)
    for rows, other in zip(episodes, order, strict=True):
        for row in rows:
            source[row] = episodes[other][0]
    dealt = {name: [samples[name][i] for i in source] for name in ("reward", "cost") if name in samples}
    gone = [name for name in (*dealt, "token_rewards", "call_rewards", "trajectory_reward") if name in samples]
    return samples.drop(gone).add(dealt)


def kl_to_reference(batch: Batch, column: str = "rollout_log_probs", *, greedy: bool = False) -> Mean:
    """KL(policy || reference) in nats a token, estimated from the policy's tokens; NaN without any.

    Of tokens that were drawn, the mean of k3 = exp(-d) - 1 + d, d = log p - log p_ref (Schulman, "Approximating KL
    divergence"), which is unbiased. Greedy tokens were not: their k3 may be far off on either side. Of these it is the
    mean of `kl_of_token`, which is at most the KL over the vocabulary.

    Args:
        column: the policy's log-probs; the reference's are in `ref_log_probs`.
        greedy: the tokens are greedy ones.
    """
    is_token = batch.tensor("response_mask").bool()
    log_probs, ref_log_probs = (batch.tensor(name, torch.float64)[is_token] for name in (column, "ref_log_probs"))
    delta = log_probs - ref_log_probs
    values = kl_of_token(log_probs, ref_log_probs) if greedy else torch.exp(-delta) - 1 + delta
    return Mean(float(values.mean()) if values.numel() else float("nan"), values.numel())
