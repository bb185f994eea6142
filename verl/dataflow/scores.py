"""Which samples of a step are the policy's own, and how they scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.batch import Batch


def own_samples(batch: Batch) -> Batch:
    """The policy's samples, without the greedy ones that they are compared with."""
    if "baseline" not in batch:
        return batch
    return batch.take([row for row, greedy in enumerate(batch["baseline"]) if not greedy])


def score_metrics(batch: Batch) -> dict[str, Any]:
    """Mean, spread and gaps of the rewards, where there are any, and means of their components."""
    if "reward" not in batch:
        return {}
    rewards = [reward for reward in batch["reward"] if reward is not None]
    mean = _mean(rewards)
    record: dict[str, Any] = {
        "reward": mean,
        "reward/mean": mean,
        "reward/std": _mean([(r - mean) * (r - mean) for r in rewards]) ** 0.5,
        "reward/abstained": len(batch) - len(rewards),
    }
    for name in (c for c in batch.columns if c.startswith("reward/")):
        record[f"{name}/mean"] = _mean([value for value in batch[name] if value is not None])
    return record


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
