"""A step written as a pipeline, an expression, a YAML file or a plain loop is the graph of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import verl
from tests.trainer.cases import SHORT, low_bytes
from verl.config import load_config
from verl.dataflow import advantages, experience, prompts, responses, updates
from verl.dataflow.graph import Graph
from verl.run.build import build_actor, build_trainer, check_settings

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
    actor = build_actor(config, "lm", checked.rows)
    return build_trainer(config, checked.tasks, actor, checked.rows).graph


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_way_of_writing_a_step_is_the_graph_of_the_trainer(tiny: Path, tmp_path: Path, name: str) -> None:
    graph = verl.Trainer(actor_of(tiny), reward_fn=low_bytes, algorithm=made(name), log_dir=False).graph
    config = settings(tiny, name, tmp_path)
    assert pipeline(tiny, name) == graph
    assert expression(tiny, name) == graph
    assert from_yaml(config) == graph
    other = {"grpo": "ppo", "ppo": "grpo", "remax": "grpo"}[name]
    assert pipeline(tiny, other) != graph
