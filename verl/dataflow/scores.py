"""Which samples of a step are the policy's own, and how they scored."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from verl.batch import Batch


class Mean(float):
    """A metric that is a mean of `count` values, and over several tasks the mean of all."""

    count: int

    def __new__(cls, value: float, count: int = 0) -> Mean:
        mean = super().__new__(cls, value)
        mean.count = count
        return mean


class Count(int):
    """A metric that adds up over tasks."""


class Seconds(float):
    """A metric that adds up over tasks."""


def without_baselines(batch: Batch) -> Batch:
    """The policy's samples, without the greedy ones that they are compared with."""
    if "baseline" not in batch:
        return batch
    return batch.take([row for row, greedy in enumerate(batch["baseline"]) if not greedy])


def one_row_per_episode(batch: Batch) -> Batch:
    """One row an episode, the last of its trajectories; of single turns, all rows."""
    return batch if "episode" not in batch else batch.take([rows[-1] for rows in batch.group_indices("episode")])


def episode_metrics(batch: Batch) -> dict[str, float]:
    """Of episodes: those that count for nothing and turns that are in no trajectory, by reason, and those cut short."""
    ended = one_row_per_episode(batch)
    reasons = Counter(filter(None, left_out_words(ended)))
    record = {
        "episodes/trajectories": len(batch) / max(len(ended), 1),
        "episodes/truncated": sum(ended["truncated"]),
        "episodes/left_out": sum(reasons.values()),
        **{f"episodes/left_out/{reason}": count for reason, count in sorted(reasons.items())},
    }
    for column, name in (("calls_left_out", "calls/left_out"), ("other_calls", "calls/other")):
        if column in ended:  # counts by reason, or by model, as JSON
            counts = sum((Counter(json.loads(text)) for text in ended[column] if text is not None), Counter[str]())
            record |= {f"{name}/{key}": count for key, count in sorted(counts.items())}
    return record


def left_out_words(batch: Batch) -> list[str | None]:
    """Why the episode of each row counts for nothing, in a word; None where it counts."""
    return [
        row["left_out"]
        or ("rejected" if row["finish"] == "reject" else None)
        or ("no_reward" if row.get("reward", 0.0) is None else None)
        for row in batch.select(["left_out", "finish", "reward"]).rows()
    ]


def written_tokens(batch: Batch) -> int:
    """Tokens of the responses that the policy wrote, without tokens of tools; all of them where no mask says."""
    if "response_mask" not in batch:
        return sum(batch.lengths("response_tokens"))
    return int(batch.tensor("response_mask").sum())


def score_metrics(batch: Batch) -> dict[str, Any]:
    """Mean, spread and gaps of the rewards, where there are any, and means of their components."""
    if "reward" not in batch:
        return {}
    rewards = [reward for reward in batch["reward"] if reward is not None]
    mean = _mean(rewards)
    record: dict[str, Any] = {
        "reward": Mean(mean, len(rewards)),
        "reward/mean": Mean(mean, len(rewards)),
        "reward/std": _mean([(r - mean) * (r - mean) for r in rewards]) ** 0.5,
        "reward/abstained": Count(len(batch) - len(rewards)),
    }
    if "group" in batch:
        by_group = [[batch["reward"][row] for row in rows] for rows in batch.group_indices()]
        scored = [present for rewards in by_group if len(present := [r for r in rewards if r is not None]) > 1]
        if scored:
            # As `algorithms.advantages.group_equal` compares them.
            alike = [max(present) - min(present) <= 1e-12 * max(map(abs, present)) for present in scored]
            record["reward/groups_alike"] = _mean([float(one) for one in alike])
    for name in (c for c in batch.columns if c.startswith("reward/")):
        record[f"{name}/mean"] = _mean([value for value in batch[name] if value is not None])
    return record


def sample_metrics(batch: Batch) -> dict[str, float]:
    """Lengths of the samples, the share that was cut off, and what their log-probs say of the policy's entropy.

    `rollout/entropy` is the mean of -log p over the sampled tokens: an unbiased estimate of the entropy of a token, in
    nats, at the sampling temperature, without a pass over the vocabulary.
    """
    lengths, count = batch.lengths("response_tokens"), batch.samples
    record = {
        "response/length": Mean(_mean(lengths) if lengths else 0.0, count),
        "response/length_min": float(min(lengths, default=0)),
        "response/length_max": float(max(lengths, default=0)),
        "response/cut": Mean(_mean([finish == "length" for finish in batch["finish"]]) if lengths else 0.0, count),
    }
    if "rollout_log_probs" in batch and "response_mask" in batch:
        log_probs, mask = batch.tensor("rollout_log_probs"), batch.tensor("response_mask").bool()
        written = log_probs[mask & log_probs.isfinite()]
        if len(written):
            record["rollout/entropy"] = Mean(-float(written.mean()), written_tokens(batch))
    return record


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
