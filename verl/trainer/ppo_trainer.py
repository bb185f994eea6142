"""`Trainer` by a name that many scripts have."""

from __future__ import annotations

from verl.trainer.trainer import Trainer


class PPOTrainer(Trainer):
    """`Trainer` with PPO: `PPOTrainer(actor=actor, reward_fn=f)` makes its own critic."""

    algorithm_name = "ppo"
