"""The record of a step: of all tasks together, what was learned from, and whether anything was."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl.dataflow.scores import Count, Mean, Seconds
from verl.errors import TrainingError

if TYPE_CHECKING:
    from verl.trainer.loop import Loop

logger = logging.getLogger(__name__)


def joined(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One record of all tasks, and in it the metrics of each under its name.

    `reward` and other means are over all samples, or tokens, that have a value: with rewards on
    several scales, look at the tasks' own.

    Args:
        records: by the prefix of the task's metrics; empty for a task alone.
    """
    record = {f"{begin}{key}": value for begin, of_task in records.items() for key, value in of_task.items()}
    for key in dict.fromkeys(key for of_task in records.values() for key in of_task):
        values = [of_task[key] for of_task in records.values() if key in of_task]
        if isinstance(values[0], Count | Seconds):
            record.setdefault(key, sum(values))
        elif isinstance(values[0], Mean):
            present = [mean for mean in values if mean.count and not math.isnan(mean)]
            if present:
                count = sum(mean.count for mean in present)
                record.setdefault(key, sum(mean.count * float(mean) for mean in present) / count)
            elif key == "reward":
                record.setdefault(key, math.nan)
    if "rollout/tokens" in record:
        rate = record["rollout/tokens"] / max(record["time/rollout"], 1e-9)
        record.setdefault("rollout/tokens_per_s", rate)
    return record


def check_learned(trainer: Loop, record: Mapping[str, Any]) -> None:
    """For the end of training, whose last record is given.

    Raises:
        RewardError, RolloutError: see `Trainer.check_failures`.
        TrainingError: there were updates, and none has changed the policy. Of one alone whose samples have no gradient,
            or are all rejected, a warning tells: it may be chance.
    """
    trainer.check_failures()
    last = None if trainer.held_out is None else trainer.held_out.last
    if last is not None and not trainer.steps and last["metrics"][last["headline"]] is None:
        raise TrainingError("the evaluation found nothing: no held-out sample has a reward (the warnings say why)")
    if not trainer.idle or trainer.updates:
        return
    sources = [task.sources["reward"] for task in trainer.tasks.values() if "reward" in task.sources]
    names = ", ".join(f"'{reward.source.name}'" for reward in sources)
    if math.isnan(record.get("reward", 0.0)):
        cause = f"reward {names} gave no finite number for any sample of the last step"
    elif record.get("grad_norm/actor") == 0 and "update/empty" not in record:
        cause = "no token had a gradient other than 0"
        cause += f": reward {names} gave the samples of a prompt one number" if names else ""
    elif trainer.skipped:
        cause = "the loss or its gradient was not finite: lower the learning rate, or train in float32"
    else:
        names = ", ".join(f"'{task.algorithm.name}'" for task in trainer.tasks.values())
        cause = f"algorithm {names} found no sample to learn from"
    # Samples of one update may score alike by chance.
    if trainer.idle == 1 and not trainer.skipped and not math.isnan(record.get("reward", 0.0)):
        logger.warning("the only update did not change the policy: %s", cause)
        return
    raise TrainingError(f"nothing was learned, none of {trainer.idle} updates changed the policy: {cause}")


def check_finite(trainer: Loop, metrics: Mapping[str, Any]) -> None:
    """Count updates that were not finite.

    Raises:
        TrainingError: too many in a row; the trainer is back at the last good checkpoint, if it has one.
    """
    trainer.skipped = trainer.skipped + 1 if skipped_roles(metrics) else 0
    if trainer.skipped < trainer.limits.max_skipped_updates:
        return
    text = (
        f"{trainer.skipped} updates in a row had a loss or gradient that is not finite (step {trainer.steps + 1}): "
        "lower the learning rate, look at the rewards, or train in float32"
    )
    if trainer.checkpoints is not None and (step := trainer.checkpoints.last_good(trainer)) is not None:
        trainer.rollback(step)
        text += f". The weights and the newest checkpoint are those of step {step}"
    raise TrainingError(text)


def skipped_roles(metrics: Mapping[str, Any]) -> set[str]:
    """Models of which no optimizer step was finite, such as "actor" or "task/math/critic"."""
    roles = set()
    for name, skipped in metrics.items():
        before, part, role = name.partition("update/skipped/")
        if part and skipped and skipped >= metrics.get(f"{before}update/steps/{role}", skipped):
            roles.add(before + role)
    return roles
