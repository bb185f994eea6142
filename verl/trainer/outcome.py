"""Whether a training run has come to anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl.errors import TrainingError

if TYPE_CHECKING:
    from verl.trainer.trainer import Trainer


def check_learned(trainer: Trainer, record: Mapping[str, Any]) -> None:
    """For the end of training, whose last record is given.

    Raises:
        RewardError, RolloutError: see `Trainer.check_failures`.
        TrainingError: there were updates, and none has changed the policy.
    """
    trainer.check_failures()
    last = None if trainer.held_out is None else trainer.held_out.last
    if last is not None and not trainer.steps and last["metrics"][last["headline"]] is None:
        raise TrainingError("the evaluation found nothing: no held-out sample has a reward (the warnings say why)")
    if not trainer.idle or trainer.updates:
        return
    if math.isnan(record.get("reward", 0.0)):
        name = trainer.sources["reward"].source.name if "reward" in trainer.sources else ""
        cause = f"reward '{name}' gave no finite number for any sample of the last step"
    elif trainer.skipped:
        cause = "the loss or its gradient was not finite: lower the learning rate, or train in float32"
    else:
        cause = f"algorithm '{trainer.algorithm.name}' found no sample to learn from"
    raise TrainingError(f"nothing was learned, none of {trainer.idle} updates changed the policy: {cause}")
