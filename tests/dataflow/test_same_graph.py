"""A step written as a pipeline, an expression, a YAML file or a plain loop is the graph of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import verl
from tests.trainer.cases import PROMPTS, SHORT, low_bytes
from verl.config import load_config
from verl.dataflow import advantages, experience, prompts, responses, updates
from verl.dataflow.graph import Graph
from verl.dataflow.trace import trace
from verl.errors import ConfigError
from verl.trainer import build
from verl.trainer.check import check_settings
from verl.trainer.logging import open_logger
from verl.trainer.outline import outline

ALGORITHMS: dict[str, dict[str, Any]] = {"grpo": {"kl_in": "loss"}, "ppo": {"kl_in": "reward"}, "remax": {}}


def made(name: str) -> verl.BaseAlgorithm:
    return verl.algorithms.make_algorithm(name, **ALGORITHMS[name])  # type: ignore[no-any-return]


def actor_of(path: Path, algorithm: Any = None) -> verl.Actor:
    return verl.Actor(str(path), algorithm=algorithm, sampling=SHORT)


def pipeline(path: Path, name: str) -> Graph:
    actor = actor_of(path)
    stages = verl.RLDataPipeline().add_stage("rollout", actor).add_stage("reward", low_bytes)
    return stages.add_stage("update", verl.Updater(made(name), actor=actor)).graph


def expression(path: Path, name: str) -> Graph:
    actor = actor_of(path, made(name))
    flow = verl.Controller().broadcast(prompts)
    flow = flow.scatter(responses, worker_group=verl.WorkerGroup(actor, verl.Reward(low_bytes))).gather(experience)
    return flow.all_reduce(advantages).scatter(updates, worker_group=verl.WorkerGroup(actor)).sync().graph


def settings(path: Path, name: str, folder: Path) -> Any:
    (folder / "reward.py").write_text("def low(texts):\n    return [0.0 for _ in texts]\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "Once upon a time"}\n' * 4)
    recipe = {
        "actor_rollout_ref": {"model": {"path": str(path)}, "rollout": {"n": 1 if name != "grpo" else 4}},
        "algorithm": {"name": name, **ALGORITHMS[name]},
        "data": {"train": str(folder / "prompts.jsonl"), "batch_size": 2},
        "reward": {"path": f"{folder / 'reward.py'}:low"},
        "trainer": {"total_steps": 1},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return load_config(folder / "recipe.yaml", [])


def from_yaml(config: Any) -> Graph:
    """As `verl train` builds it."""
    checked = check_settings(config)
    actor = build.build_actor(config, "lm", checked.rows)
    tasks = build.build_tasks(config, checked.algorithms)
    return build.build_trainer(config, tasks, actor, checked.rows, open_logger(None, ())).graph


def loop(path: Path, name: str) -> verl.RLDataPipeline:
    def step(actor: verl.Actor, reward_model: verl.Reward, critic: verl.Critic, prompts: Any) -> None:
        sequences = actor.generate_sequences(prompts)
        rewards = reward_model.get_reward(sequences)
        if name != "ppo":
            actor.update(sequences, rewards)
            return
        values = critic.compute_values(sequences)
        actor.update(sequences, rewards, values)
        critic.update(sequences.add(values), rewards)

    critic = verl.Critic(str(path))
    return trace(step, actor_of(path, made(name)), verl.Reward(low_bytes), critic)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_way_of_writing_a_step_is_the_graph_of_the_trainer(tiny: Path, tmp_path: Path, name: str) -> None:
    graph = verl.Trainer(actor_of(tiny), reward_fn=low_bytes, algorithm=made(name), log_dir=False).graph
    config = settings(tiny, name, tmp_path)
    assert pipeline(tiny, name) == graph
    assert expression(tiny, name) == graph
    assert from_yaml(config) == graph
    assert loop(tiny, name).graph == graph
    assert outline(config) == {"main": graph}  # what `verl plan --graph` draws
    other = {"grpo": "ppo", "ppo": "grpo", "remax": "grpo"}[name]
    assert pipeline(tiny, other) != graph


def test_a_traced_loop_runs_and_learns(tiny: Path) -> None:
    result = loop(tiny, "ppo").run(PROMPTS)
    assert {"loss/actor", "loss/critic", "kl"} <= result.metrics.keys()
    assert len(result.batch) == len(PROMPTS)


def test_a_traced_loop_without_an_algorithm_learns_as_its_verbs_would(tiny: Path) -> None:
    def step(actor: verl.Actor, reward: verl.Reward, prompts: Any, n: int = 1) -> None:
        sequences = actor.generate_sequences(prompts, n=n)
        actor.update(sequences, rewards=reward.get_reward(sequences))

    for n, name in ((1, "reinforce_plus_plus"), (2, "grpo")):
        actor = actor_of(tiny)
        graph = trace(lambda a, r, p, n=n: step(a, r, p, n), actor, verl.Reward(low_bytes)).graph  # type: ignore[misc]
        assert graph == verl.Trainer(actor, reward_fn=low_bytes, algorithm=name, log_dir=False).graph


def test_what_a_traced_loop_cannot_say_is_refused_by_name(tiny: Path) -> None:
    actor, reward = actor_of(tiny, made("ppo")), verl.Reward(low_bytes)

    def refused(step: Any, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            trace(step, actor, reward)

    def without_critic(actor: Any, reward: Any, prompts: Any) -> None:
        sequences = actor.generate_sequences(prompts)
        actor.update(sequences, reward.get_reward(sequences))

    refused(without_critic, "'ppo' trains a critic, which the step does not update")
    refused(lambda actor, reward, prompts: reward.get_reward(prompts), r"Reward.get_reward .* lacks \['sequences'\]")
    refused(lambda actor, reward, prompts: actor.generate(prompts), "cannot call 'generate' of Actor: did you mean")
    refused(lambda actor, reward, prompts: None, "calls generate_sequences 0 times")
    refused(lambda actor, reward, prompts: actor.generate_sequences(["a"]), "gets prompts, or what its other calls")
    refused(
        lambda actor, reward, prompts: actor.generate_sequences(prompts)["response"],
        r"has no numbers yet, and reads sequences\['response'\]",
    )
    with pytest.raises(ConfigError, match="not a int"):
        trace(lambda number, prompts: None, 3)
