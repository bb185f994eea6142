"""The log record of a step of several tasks: each task's own metrics, and what is of all."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from verl.batch import Batch
from verl.dataflow.scores import by_episode, own_samples, written_tokens

#: What a step counts, summed over tasks.
_SUMS = ("rollout/tokens", "time/rollout", "reward/abstained", "rollout/resamples", "rollout/rejected_prompts")
#: Means over the samples that have a reward, over all, and over tokens.
_BY_REWARD, _BY_SAMPLE = ("reward", "reward/mean"), ("response/length", "response/cut")
_BY_TOKEN = ("rollout/entropy", "kl")


def joined(
    samples: Mapping[str, Batch], records: Mapping[str, Mapping[str, Any]], tasks: Collection[str]
) -> dict[str, Any]:
    """One record of all tasks, with each task's own under `task/<name>/`; that of the only task as it is.

    `reward` and other means are over all samples, or tokens, that have a value: with rewards on several scales, look at
    those of the tasks.
    """
    if len(tasks) == 1:
        return dict(*records.values())
    record: dict[str, Any] = {}
    for name, of_it in records.items():
        record |= of_task(name, of_it) | of_task(name, {"samples": len(samples[name])})
    for key in _SUMS:
        if counts := [of_it[key] for of_it in records.values() if key in of_it]:
            record[key] = sum(counts)
    for key in (*_BY_REWARD, *_BY_SAMPLE, *_BY_TOKEN):
        weighed = [(_count(key, samples[name]), of_it[key]) for name, of_it in records.items() if key in of_it]
        weighed = [(count, value) for count, value in weighed if count and not math.isnan(value)]
        if weighed:
            record[key] = sum(count * value for count, value in weighed) / sum(count for count, _ in weighed)
    if any("reward" in of_it for of_it in records.values()):
        record.setdefault("reward", math.nan)
    if "rollout/tokens" in record:
        record["rollout/tokens_per_s"] = record["rollout/tokens"] / max(record["time/rollout"], 1e-9)
    return record


def _count(key: str, samples: Batch) -> int:
    """The number of values of which a task's metric is the mean."""
    policys = own_samples(samples)
    if key in _BY_TOKEN:
        return written_tokens(policys)
    policys = by_episode(policys)
    return len(policys) - policys["reward"].count(None) if key in _BY_REWARD else len(policys)


def of_task(name: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of one of several tasks, by the names they have in a record."""
    return {f"task/{name}/{key}": value for key, value in metrics.items()}


def trained(samples: Iterable[Batch], metrics: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """The tokens that an update of so many seconds learned from."""
    tokens = sum(sum(own_samples(batch).lengths("response_tokens")) for batch in samples)
    tokens -= round(metrics.get("update/tokens_left_out/actor", 0.0))
    return {"train/tokens": tokens, "train/tokens_per_s": tokens / max(seconds, 1e-9), "time/update": seconds}


def rates(name: str, samples: Batch, record: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """Throughput of a task that took part in a step, over the seconds since it did so before: `samples_per_s`,
    `updates_per_s`, `rewards_per_s`, `tokens_per_s` (that the policy wrote) and `rejection_rate`."""
    ended = by_episode(samples)
    scored = len(ended) - ended["reward"].count(None) if "reward" in ended else 0
    counts = {
        "samples": len(ended),
        "updates": 1 if record["updated"] else 0,
        "rewards": scored,
        "tokens": written_tokens(samples),
    }
    per_second = {f"{what}_per_s": count / max(seconds, 1e-9) for what, count in counts.items()}
    rejected = record.get(f"task/{name}/rollout/rejection_rate", 0.0)
    return of_task(name, {**per_second, "rejection_rate": rejected})
