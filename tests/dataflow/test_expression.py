"""A step as an expression: lazy, the trainer's graph, the trainer's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import verl
from tests.trainer.cases import PROMPTS, SHORT, low_bytes
from verl.dataflow import advantages, experience, prompts, responses, updates
from verl.errors import ConfigError
from verl.workers.actor import ActorWorker


def actor_of(path: Path, algorithm: str) -> verl.Actor:
    return verl.Actor(str(path), algorithm=algorithm, optim={"lr": 1e-2}, sampling=SHORT)


def expression(rollout_group: Any, update_group: Any) -> Any:
    controller = verl.Controller()
    return (
        controller.broadcast(prompts)
        .scatter(responses, worker_group=rollout_group)
        .gather(experience)
        .all_reduce(advantages)
        .scatter(updates, worker_group=update_group)
        .sync()
    )


def weights(of: verl.Actor | verl.Critic) -> dict[str, torch.Tensor]:
    return {shard.name: shard.tensor.detach().clone() for shard in of.shards()}


@pytest.mark.quick("grpo")
@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "remax"])
def test_two_runs_are_two_steps_of_the_trainer_bit_for_bit(tiny: Path, algorithm: str) -> None:
    actor = actor_of(tiny, algorithm)
    update_group = verl.WorkerGroup(actor)
    flow = expression(verl.WorkerGroup(actor, verl.Reward(low_bytes)), update_group)
    trainer = verl.Trainer(actor_of(tiny, algorithm), reward_fn=low_bytes, algorithm=algorithm, log_dir=False)
    assert flow.graph == trainer.graph
    for _ in range(2):
        found, wanted = flow.run(PROMPTS), trainer.step(PROMPTS)
        assert found == {name: wanted[name] for name in found}
        assert {"reward", "loss/actor", "grad_norm/actor"} <= found.keys()
    trained = {"actor": actor, **update_group.updater.critics}
    assert trained.keys() == trainer.roles.keys() and len(trained) == (2 if algorithm == "ppo" else 1)
    for role, handle in trained.items():
        ours, others = weights(handle), weights(trainer.roles[role])
        assert ours.keys() == others.keys()
        assert all(torch.equal(ours[name], others[name]) for name in ours)


def test_an_expression_computes_nothing_before_it_runs(tiny: Path) -> None:
    actor = actor_of(tiny, "grpo")
    flow = expression(verl.WorkerGroup(actor, verl.Reward(low_bytes)), verl.WorkerGroup(actor))
    assert not actor.has_workers
    before = flow.graph
    assert flow.graph == before and not actor.has_workers


def test_an_updater_with_its_options_and_a_registered_node_are_part_of_the_graph(tiny: Path) -> None:
    @verl.register_node("length_cost")
    class LengthCost(verl.RewardNode):
        column = "cost"

        def score(self, texts: list[str]) -> list[float]:
            return [float(len(text)) for text in texts]

    options = {"baseline": "group", "cost_limit": 3.0}
    actor = verl.Actor(str(tiny), sampling=SHORT)
    group = verl.WorkerGroup(verl.Updater("safe_rlhf", actor=actor, **options), verl.Reward(low_bytes))
    flow = (
        verl.Controller()
        .broadcast(prompts)
        .scatter(responses, worker_group=group)
        .gather(experience, "length_cost")
        .all_reduce(advantages)
        .scatter(updates, worker_group=group)
        .sync()
    )
    other = verl.Trainer(
        actor, reward_fn=low_bytes, nodes=["length_cost"], algorithm="safe_rlhf", log_dir=False, **options
    )
    assert flow.graph == other.graph
    assert flow.run(PROMPTS)["cost/mean"] == pytest.approx(6.0, abs=1.0)


def test_the_beginning_of_an_expression_samples_and_scores(tiny: Path) -> None:
    actor = actor_of(tiny, "grpo")
    group = verl.WorkerGroup(actor, verl.Reward(low_bytes))
    scored = verl.Controller().broadcast(prompts).scatter(responses, worker_group=group).gather(experience)
    assert scored.graph.order == ["rollout", "reward"]
    before = weights(actor)
    assert 0 <= scored.run(PROMPTS)["reward"] <= 1
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(actor).items())
    with pytest.raises(ConfigError, match=r"ends with advantages: go on with scatter\(updates, worker_group=...\)"):
        _ = scored.all_reduce(advantages).graph


def test_wrong_expressions_are_refused_by_name(tiny: Path) -> None:
    actor, controller = actor_of(tiny, "grpo"), verl.Controller()
    group = verl.WorkerGroup(actor)
    begun = controller.broadcast(prompts)
    with pytest.raises(ConfigError, match=r"gather\(experience\) has no place after prompts: here comes scatter"):
        begun.gather(experience)
    with pytest.raises(ConfigError, match=r"broadcast\(responses\) has no place: here comes broadcast\(prompts\)"):
        controller.broadcast(responses)
    with pytest.raises(ConfigError, match=r"all_reduce\(responses\) has no place after prompts"):
        begun.all_reduce(responses)
    with pytest.raises(ConfigError, match=r"worker_group is a verl.WorkerGroup\(actor\), not a Actor"):
        begun.scatter(responses, worker_group=actor)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"sync\(\) comes after scatter\(updates, ...\), not after prompts"):
        begun.sync()
    with pytest.raises(ConfigError, match="reads column 'reward', which no node writes"):
        expression(group, group).run(PROMPTS)
    with pytest.raises(ConfigError, match="different actors"):
        _ = expression(group, verl.WorkerGroup(actor_of(tiny, "grpo"))).graph
    with pytest.raises(ConfigError, match="a second actor"):
        verl.WorkerGroup(actor, actor)
    with pytest.raises(ConfigError, match="no actor"):
        verl.WorkerGroup(verl.Reward(low_bytes))


def test_a_worker_group_is_reached_as_one(tiny: Path) -> None:
    group = verl.WorkerGroup(actor_of(tiny, "grpo"))
    assert group.size == 1
    assert group.call(ActorWorker.exact_rollout) is True
    assert group.call("exact_rollout") is True  # type: ignore[arg-type]  # by name, as it once was
