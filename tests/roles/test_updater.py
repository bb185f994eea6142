"""One call of an updater is what a plain loop over the calls does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import verl
from verl.dataflow.graph import Node
from verl.errors import ConfigError, DataError, ModelError
from verl.weights.shard import checksum

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
    assert updater.critics.keys() == {"critic", "cost_critic"} and actor.reference.model is not None
    sequences, rewards = scored(actor)
    seen = updater.compute_log_probs_and_values(sequences)
    assert {"ref_log_probs", "values", "cost_values"} <= set(seen.columns)
    metrics = updater.update(seen.add({"reward": rewards, "cost": rewards[::-1]}))
    assert {"loss/actor", "loss/critic", "loss/cost_critic", "lambda"} <= metrics.keys()


class Halves(verl.BaseAlgorithm):
    """Writes over what the samples have."""

    name = "halves"

    def prepare(self, batch: verl.Batch) -> tuple[verl.Batch, dict[str, float]]:
        batch, metrics = super().prepare(batch)
        return batch.drop(["reward"]).add({"reward": batch.tensor("reward") / 2}), metrics

    def compute_loss(self, x: verl.LossInput) -> verl.Loss:
        return verl.Loss(total=-(x.weights * x.columns["advantages"] * self.needed_log_probs(x)).sum())


def test_an_algorithm_that_writes_over_a_column_is_named(tiny: Path) -> None:
    """By an updater and by a trainer, whose graph adds columns and overwrites none."""
    words = "algorithm 'halves': its prepare returned other values of column 'reward'.*such as 'halves_reward'"
    actor = verl.Actor(str(tiny), optim=OPTIM)
    updater = verl.Updater(Halves(), actor=actor)
    trainer = verl.Trainer(actor, algorithm=Halves(), reward=len, log_dir=False)
    sequences, rewards = scored(actor)
    for update in (updater.update, trainer.learn):
        with pytest.raises(DataError, match=words):
            update(sequences.add({"reward": rewards}))


class Talks(Halves):
    """Calls a metric of its own as one of every loss is called."""

    name = "talks"

    def prepare(self, batch: verl.Batch) -> tuple[verl.Batch, dict[str, float]]:
        return verl.BaseAlgorithm.prepare(self, batch)[0], {"loss/actor": 1.0}


def test_a_metric_of_an_algorithm_hides_no_other(tiny: Path) -> None:
    actor = verl.Actor(str(tiny), optim=OPTIM)
    sequences, rewards = scored(actor)
    with pytest.raises(ConfigError, match="a metric of algorithm 'talks' is called 'loss/actor', and another one is"):
        verl.Updater(Talks(), actor=actor).update(sequences, rewards)


@pytest.mark.parametrize("metric", ["rollout/tokens", "loss/actor", "time/step", "memory/peak_gb", "mismatch/kl"])
def test_a_metric_of_a_node_hides_none_of_the_trainers(tiny: Path, metric: str) -> None:
    class Counts:
        def as_node(self, name: str) -> Node:
            return Node(name=name, run=lambda rows: (None, {metric: 1.0}), inputs=("response_tokens",))

    def numbers(texts: list[str]) -> list[float]:
        return [float(i) for i, _ in enumerate(texts)]

    actor = verl.Actor(str(tiny), optim=OPTIM, sampling={"max_new_tokens": 2})
    trainer = verl.Trainer(actor, reward=numbers, nodes={"counts": Counts()}, n=2, algorithm="grpo", log_dir=False)
    with pytest.raises(ConfigError, match=rf"metrics? of a (node|step) (is|are) called '{metric}'"):
        trainer.step(["One"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "kto", "sft", "orpo"])
def test_offline_algorithms_learn_from_a_loaders_batch(tiny: Path, name: str) -> None:
    rows: dict[str, dict[str, Any]] = {
        "dpo": {"chosen": "good", "rejected": "bad"},
        "kto": {"completion": "good", "label": True},
        "sft": {"completion": "good"},
        "orpo": {"chosen": "good", "rejected": "bad"},
    }
    actor, other = (verl.Actor(str(tiny), optim=OPTIM) for _ in range(2))
    source = [{"prompt": f"Prompt {i}", **rows[name]} for i in range(4)]
    batch = next(verl.OfflineDatasetLoader(source, actor.tokenizer, batch_size=4))
    updater = verl.Updater(name, actor=actor)
    trainer = verl.Trainer(other, algorithm=name, log_dir=False)
    for _ in range(2):
        metrics = updater.update(updater.compute_log_probs_and_values(batch))
        assert metrics["loss/actor"] == trainer.step(batch)["loss/actor"]
    assert checksum(actor.shards()) == checksum(other.shards())


def test_a_head_of_another_kind_is_refused(tiny: Path) -> None:
    actor = verl.Actor(str(tiny))
    with pytest.raises(ConfigError, match=r"head of kind 'score'.*head='score'"):
        verl.Updater("reward_model", actor=actor)
    with pytest.raises(ConfigError, match="no option 'bta'"):
        verl.Updater("dpo", actor=actor, bta=0.2)


def test_a_critic_over_the_actors_own_model_is_refused(tiny: Path) -> None:
    actor = verl.Actor(str(tiny), optim=OPTIM)
    with pytest.raises(ConfigError, match="actor are over one model"):
        verl.Updater("ppo", actor=actor, critic=verl.Critic(actor.model))


def test_what_verbs_cannot_take_is_told(tiny: Path) -> None:
    actor, critic = verl.Actor(str(tiny)), verl.Critic(str(tiny))
    for method in (critic.compute_values, actor.compute_log_probs):
        with pytest.raises(DataError, match="a Batch of generate_sequences, not a list"):
            method(["text"])
    with pytest.raises(ModelError, match="Linear is no model of transformers"):
        verl.Critic(torch.nn.Linear(2, 2))


def test_sampling_may_be_a_mapping(tiny: Path) -> None:
    actor = verl.Actor(str(tiny), sampling={"max_new_tokens": 3, "stop": ["x"]})
    assert actor.sampling == verl.SamplingParams(max_new_tokens=3, stop=("x",))
    trainer = verl.Trainer(actor, reward_fn=len, algorithm="grpo", sampling={"temperature": 0.5}, log_dir=False)
    assert trainer.sampling == verl.SamplingParams(max_new_tokens=3, stop=("x",), temperature=0.5)
    with pytest.raises(ConfigError, match=r"no sampling setting 'temprature'.*temperature"):
        verl.Actor(str(tiny), sampling={"temprature": 1})
    with pytest.raises(ConfigError, match="sampling: must be SamplingParams or a mapping"):
        verl.Actor(str(tiny), sampling=3)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_what_is_rejected_whole_moves_nothing(tiny: Path, name: str) -> None:
    options = {"kl_in": "none", "kl_target": None} if name == "ppo" else {}
    actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, mini_batch_size=3)
    updater = verl.Updater(name, actor=actor, rollout_rs="token_k1", rollout_rs_threshold=1.5, **options)
    sequences, rewards = scored(actor)
    first = updater.update(sequences, rewards)  # from here on the optimizer's moments would move the weights
    assert first["grad_norm/actor"] > 0 and "update/empty/actor" not in first
    models: list[verl.Actor | verl.Critic] = [actor, *updater.critics.values()]
    before = [checksum(model.shards()) for model in models]
    far = [[log_prob - 20 for log_prob in row] for row in sequences["rollout_log_probs"]]
    metrics = updater.update(sequences.drop(["rollout_log_probs"]).add({"rollout_log_probs": far}), rewards)
    assert metrics["mismatch/rejected"] == 1.0 and actor.policy_version == 1
    assert [metrics[f"update/empty/{role}"] for role in ("actor", *updater.critics)] == [1.0] * len(models)
    assert [checksum(model.shards()) for model in models] == before
    # Of two mini-batches, one of which is rejected, the other is learned from.
    half = [row if group == sequences["group"][0] else low for row, low, group in
            zip(sequences["rollout_log_probs"], far, sequences["group"], strict=True)]  # fmt: skip
    metrics = updater.update(sequences.drop(["rollout_log_probs"]).add({"rollout_log_probs": half}), rewards)
    assert metrics["grad_norm/actor"] > 0 and "update/empty/actor" not in metrics
