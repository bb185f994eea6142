"""Calls that mypy accepts and refuses. It reads this file with the package: a wrong call that it let pass would leave a
`type: ignore` unused, which is an error. Nothing here runs."""

from __future__ import annotations

import verl


def accepted(actor: verl.Actor) -> None:
    verl.Trainer(actor, reward_fn=len, algorithm="grpo", n=8, kl_coef=0.01, save_every=10, checkpoint_dir="x")
    verl.PPOTrainer(actor=actor, reward_fn=len, update_freq=64, buffer="disk", buffer_size=128, use_amp=False)
    verl.AsyncTrainer(actor, reward=len, batch_size=8, max_staleness=1, log_dir=False, algorithm="grpo")


def refused(actor: verl.Actor) -> None:
    verl.Trainer(actor, reward_fn=len, save_evry=10)  # type: ignore[call-arg]
    verl.Trainer(actor, reward_fn=len, save_every="often")  # type: ignore[arg-type]
    verl.PPOTrainer(actor, reward_fn=len, batch_size=8)  # type: ignore[call-arg]
    verl.AsyncTrainer(actor, reward=len, max_staleness=1)  # type: ignore[call-arg]
    verl.InterleavedTrainer(actor, max_stalenes=1)  # type: ignore[call-arg]
