"""One call of an updater is what a plain loop over the verbs does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import verl
from verl.errors import ConfigError

OPTIM = {"lr": 1e-3}


def scored(actor: verl.Actor) -> tuple[verl.Batch, list[float]]:
    sequences = actor.generate_sequences(["One", "Two"], n=3, key="k", max_new_tokens=4)
    return sequences, [float(i % 3) for i in range(len(sequences))]


def test_an_update_is_the_actors_own(tiny: Path) -> None:
    one, other = (verl.Actor(str(tiny), optim=OPTIM, algorithm="grpo") for _ in range(2))
    sequences, rewards = scored(one)
    updater = verl.Updater("grpo", actor=other)
    metrics = updater(scored(other)[0], rewards)
    assert metrics["loss/actor"] == one.update(sequences, rewards)["loss"]
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert updater.critics == {} and other.policy_version == 1


def test_models_that_the_algorithm_asks_for_are_made(tiny: Path) -> None:
    actor = verl.Actor(str(tiny), optim=OPTIM)
    updater = verl.Updater("safe_rlhf", actor=actor, baseline="critics", kl_in="reward")
    assert updater.critics.keys() == {"critic", "cost_critic"} and actor.reference_model is not None
    sequences, rewards = scored(actor)
    seen = updater.experience(sequences)
    assert {"ref_log_probs", "values", "cost_values"} <= set(seen.columns)
    metrics = updater.update(seen.add({"reward": rewards, "cost": rewards[::-1]}))
    assert {"loss/actor", "loss/critic", "loss/cost_critic", "lambda"} <= metrics.keys()


def test_a_head_of_another_kind_is_refused(tiny: Path) -> None:
    actor = verl.Actor(str(tiny))
    with pytest.raises(ConfigError, match=r"head of kind 'score'.*head='score'"):
        verl.Updater("reward_model", actor=actor)
    with pytest.raises(ConfigError, match="no option 'bta'"):
        verl.Updater("dpo", actor=actor, bta=0.2)
