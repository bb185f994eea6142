"""From a run's settings to a plan and back: what is printed can be pasted, and loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.calibrate import measure
from tests import forked
from verl.cli.plan import cluster_of, plan_placement
from verl.cluster.placement import DeviceMesh
from verl.config import load_config
from verl.errors import ConfigError, ModelError
from verl.models.memory import ModelSize
from verl.models.options import ModelOptions
from verl.planner.hardware import Cluster, Efficiency
from verl.planner.search import search
from verl.run.planned import model_size, placement, problem_of
from verl.training.options import layout_of
from verl.weights.layout import ModelShape

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
ROLES = {"actor", "critic", "reference", "reward"}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    model = tmp_path / "llama"
    model.mkdir()
    model.joinpath("config.json").write_text(json.dumps(LLAMA))
    content = {
        "actor_rollout_ref": {
            "model": {"path": str(model)},
            "actor": {"mini_batch_size": 128, "max_tokens_per_micro_batch": 4096},
            "rollout": {"n": 1, "max_new_tokens": 1024, "max_num_seqs": 512},
        },
        "algorithm": {"name": "ppo", "kl_in": "reward"},
        "data": {"train": {"task": "chain_sum"}, "batch_size": 1024, "max_prompt_length": 1024},
        "reward": {"model": str(model)},
    }
    file = tmp_path / "ppo.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def merged(into: dict, more: dict) -> dict:
    return {**into, **{k: merged(into.get(k, {}), v) if isinstance(v, dict) else v for k, v in more.items()}}


@pytest.mark.parametrize("cluster", ["2xH200", "4x8xA100"])
def test_what_is_printed_is_pasted_into_a_file_that_loads(recipe: Path, cluster: str) -> None:
    printed = "\n".join(plan_placement(load_config(recipe), Cluster.parse(cluster, 200)))
    (block,) = (part for part in printed.split("\n\n") if part.startswith("# "))
    recipe.write_text(yaml.safe_dump(merged(yaml.safe_load(recipe.read_text()), yaml.safe_load(block))))
    config = load_config(recipe)
    mesh = DeviceMesh(config.trainer.placement)
    mesh.check({"cuda": Cluster.parse(cluster).size}, cluster)
    policy = config.actor_rollout_ref.actor
    sections = {"actor": policy, "critic": config.critic.options(policy)}
    sections["reference"] = sections["actor"]  # it is cut as the actor is
    for role, options in sections.items():
        layout = layout_of(options, len(mesh.pool(role)))
        layout.check(ModelShape(layers=32, heads=32, kv_heads=32))
    assert set(mesh.pools) == ROLES


def test_a_reference_apart_from_the_actor_is_cut_as_the_actor_is(recipe: Path) -> None:
    problem = problem_of(load_config(recipe), ROLES, Cluster.parse("4x8xA100", 200))
    apart = [["actor", "critic", "reward"], ["reference"]]
    plan = search(problem, [apart])[0]
    assert plan.choice("reference").key == plan.choice("actor").key
    assert placement(plan)["reference"] != placement(plan)["actor"]


@pytest.mark.slow
def test_a_prediction_of_the_whole_is_shown(recipe: Path) -> None:
    cluster = Cluster.parse("4x8xA100", 200)
    printed = "\n".join(plan_placement(load_config(recipe), cluster, scaling=True))
    for part in ("Rollout", "Timeline", "Memory of a rank", "Runners-up", "of linear", "KV cache", "decode"):
        assert part in printed


def test_settings_that_are_not_modelled_are_refused_by_name(recipe: Path) -> None:
    cluster = Cluster.parse("8xA100")
    for override, name in (
        ("actor_rollout_ref.model.lora={r: 8}", "LoRA"),
        ("actor_rollout_ref.actor.deepspeed_config.zero_stage=3", "deepspeed_config"),
        ("critic.fsdp_config.fsdp_size=2", "fsdp_size"),
        ("actor_rollout_ref.rollout.name=hf", "'hf'"),
        ("actor_rollout_ref.model.path=/nowhere", "no configuration at '/nowhere'"),
    ):
        with pytest.raises((ConfigError, ModelError), match=name):
            problem_of(load_config(recipe, [override]), ROLES, cluster)


def test_options_of_fsdp_stay(recipe: Path) -> None:
    override = ["actor_rollout_ref.actor.strategy=fsdp", "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"]
    problem = problem_of(load_config(recipe, override), ROLES, Cluster.parse("8xA100"))
    (strategy,) = problem.models[0].strategies
    assert strategy.name == "fsdp"
    assert strategy.parked


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
def test_the_size_of_a_model_is_read_off_its_configuration(kind: str, tmp_path: Path) -> None:
    small = {"llama": {"num_key_value_heads": 2}, "qwen2": {"num_key_value_heads": 2}, "gpt2": {}}[kind]
    names = (
        ("n_embd", "n_layer", "n_head")
        if kind == "gpt2"
        else ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    config = AutoConfig.for_model(kind, **dict(zip(names, (128, 3, 4), strict=True)), vocab_size=512, **small)
    if kind != "gpt2":
        config.intermediate_size = 352
    config.dtype = "float32"
    config.save_pretrained(tmp_path)
    whole = ModelSize.from_model(AutoModelForCausalLM.from_config(config))
    found = model_size(ModelOptions(path=str(tmp_path)))
    assert found.parameters == whole.parameters
    assert (found.layers, found.hidden, found.kv_heads, found.head_dim, found.itemsize) == (
        whole.layers, whole.hidden, whole.kv_heads, whole.head_dim, whole.itemsize
    )  # fmt: skip


def test_shares_are_read_and_refused() -> None:
    assert cluster_of("8xA100", None, "0.4,0.7,0.3").efficiency == Efficiency(0.4, 0.7, 0.3)
    for text in ("0.4,0.7,2", "fast", "0.1,0.2,0.3,0.4"):
        with pytest.raises(ConfigError, match="efficiency"):
            cluster_of("8xA100", None, text)


@pytest.mark.slow
def test_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.calibrate.subprocess.Popen", forked.Popen)
    measured = measure()
    assert min(measured.flops, measured.bandwidth, measured.network or 0.0) > 1e6
    assert measured.efficiency is None or measured.efficiency.compute > 0


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys, verl.planner.search, verl.run.planned, verl.planner.picture; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
