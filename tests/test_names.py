"""Every place where names of the user's are looked up: a misspelt one is an error that has the nearest name."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import verl
from verl._base.names import check_logged
from verl.algorithms import make_algorithm
from verl.batch import Batch
from verl.cluster.placement import DeviceMesh
from verl.config import load_config
from verl.data.chat import template_inputs
from verl.data.task_loader import by_task
from verl.data.tasks import make_task
from verl.dataflow.graph import Graph, Node
from verl.dataflow.nodes import make_stage
from verl.errors import ConfigError, DataError, RolloutError, VerlError
from verl.models.lora import add_lora, check_adapter_names
from verl.models.options import LoraOptions
from verl.report.sinks import check_loggers
from verl.rewards.environments import with_episodes
from verl.rewards.make import make_reward
from verl.rollout.environments import EnvironmentEpisode
from verl.rollout.gateway.gateway import Gateway
from verl.rollout.guards import make_guard
from verl.trainer.task import check_reads
from verl.trainer.task_weights import DynamicTaskWeightScheduler
from verl.trl import SFTConfig, SFTTrainer
from verl.workers.actor import engine_factory


def tiny_llama() -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            LlamaConfig(
                vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, pad_token_id=0,
            )
        )  # fmt: skip


def adapters(**changes: Any) -> None:
    config = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | changes)
    check_adapter_names(tiny_llama(), config, "peft_config")


def settings(*overrides: str) -> Any:
    return load_config(None, ["actor_rollout_ref.model.path=none", *overrides])


class Shop:
    def reset(self, **row: Any) -> None: ...

    def buy(self) -> str:
        """Buy."""
        return "bought"

    def get_reward(self) -> float:
        return 1.0


def environment(name: Any) -> None:
    rows = Batch.from_columns({"prompt": ["a", "b"], "environment": ["bank", name]})
    reward = with_episodes(None, EnvironmentEpisode({"shop": Shop, "bank": Shop}))
    check_reads({"data.train": rows}, [reward])


def length(responses: list[str]) -> list[float]:
    return [float(len(response)) for response in responses]


def by_source(name: str) -> None:
    columns = {"prompt": ["a"] * 300, "data_source": ["openai/gsm8k"] * 299 + [name], "ground_truth": ["1"] * 300}
    check_reads({"data.train": Batch.from_columns(columns)}, [make_reward("data_source")])


PLACES: dict[str, tuple[Callable[[], object], str]] = {
    "lora targets": (lambda: add_lora(tiny_llama(), LoraOptions(targets=("v_proj", "q_porj"))), "q_proj"),
    "lora all-linear among others": (
        lambda: add_lora(tiny_llama(), LoraOptions(targets=("q_proj", "all-linear"))),
        "model.lora.targets: the model has no 'all-linear'",
    ),
    "peft target_modules": (lambda: adapters(target_modules=["v_proj", "self_attn.q_porj"]), "self_attn.q_proj"),
    "peft exclude_modules": (lambda: adapters(exclude_modules=["k_porj"]), "k_proj"),
    "peft modules_to_save": (lambda: adapters(modules_to_save=["lm_haed"]), "lm_head"),
    "peft target_parameters": (lambda: adapters(target_parameters=["gate_prj.weight"]), "gate_proj.weight"),
    "peft layers_to_transform": (lambda: adapters(layers_to_transform=[1, 7]), "no 7: known: 0, 1"),
    "peft layers_pattern": (lambda: adapters(layers_to_transform=1, layers_pattern=["layer"]), "layers"),
    "peft rank_pattern": (lambda: adapters(rank_pattern={"q_proj": 2, "k_porj": 2}), "k_proj"),
    "peft alpha_pattern": (lambda: adapters(alpha_pattern={"v_porj": 2}), "v_proj"),
    "peft trainable_token_indices": (lambda: adapters(trainable_token_indices={"embd_tokens": [1]}), "embed_tokens"),
    "column environment": (lambda: environment("shpo"), "data.train: the column 'environment' has 'shpo': .* 'shop'"),
    "column environment, null": (lambda: environment(None), "has None: known: bank, shop"),
    "column data_source": (lambda: by_source("openai/gsm8j"), "'openai/gsm8j': did you mean 'openai/gsm8k'"),
    "column task": (lambda: by_task([{"task": "maht"}], ["math"]), "math"),
    "column tools": (
        lambda: template_inputs({"tools": json.dumps([tool("serch")])}, [tool("search")]),
        "search",
    ),
    "rewards": (lambda: settings("reward.name=mat"), "math"),
    "weights of rewards": (lambda: make_reward({"length": length}, weights={"lenght": 1.0}), "length"),
    "options of a reward": (lambda: make_reward(length, timeot=1), "timeout"),
    "columns of a reward": (
        lambda: check_reads(
            {"d": Batch.from_columns({"prompt": ["a"], "answer": ["b"]})}, [make_reward(lambda responses, anwser: [])]
        ),
        "answer",
    ),
    "algorithms": (lambda: make_algorithm("dpa"), "dpo"),
    "options of an algorithm": (lambda: make_algorithm("grpo", kl_cof=1), "kl_coef"),
    "KL estimators": (lambda: make_algorithm("grpo", kl_in="loss", kl_estimator="lov_var"), "low_var_kl"),
    "settings": (lambda: settings("trainer.total_step=1"), "total_steps"),
    "loggers": (lambda: check_loggers(["consol"]), "console"),
    "roles of a placement": (lambda: DeviceMesh({"actr": "cpu:0"}), "actor"),
    "keys of a placement": (lambda: DeviceMesh({"actor": {"cpu_id": [0]}}), "cpu_ids"),
    "engines": (lambda: engine_factory("embeded"), "embedded"),
    "text guards": (lambda: make_guard("no_such"), "no guard is called 'no_such'"),
    "stages": (lambda: make_stage("no_such"), "no node is called 'no_such'"),
    "nodes": (lambda: graph("scoer"), "score"),
    "procedural tasks": (lambda: make_task("basic_arithmetc"), "basic_arithmetic"),
    "tasks that a scheduler weighs": (lambda: settings(*TASKS), "math"),
    "metric of a scheduler": (
        lambda: DynamicTaskWeightScheduler({"a": 1.0, "b": 1.0}, metric_key="reward/maen").update(
            0, {"a": {"reward/mean": 1.0}}
        ),
        "reward/mean",
    ),
    "metric of a guard": (lambda: check_logged("guard", "reward/acuracy", ["reward/accuracy"]), "reward/accuracy"),
    "metric of an evaluation": (lambda: check_logged("guard", "eval/acuracy", ["eval/accuracy"]), "eval/accuracy"),
    "keys of models": (lambda: Gateway(len, models={"judge": "start"}, model_keys={"jugde": "KEY"}), "judge"),
}
TASKS = (
    "tasks=[{name: math, type: sft}, {name: code, type: sft}]",
    "trainer.task_scheduler={initial_weights: {mth: 1.0}}",
)


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def graph(after: str) -> Graph:
    score = Node(name="score", run=lambda rows: rows, inputs=("prompt",), outputs=("reward",))
    later = Node(name="later", run=lambda rows: rows, inputs=("prompt",), outputs=("other",), after=(after,))
    return Graph([score, later], ["prompt"])


@pytest.mark.parametrize("place", PLACES)
def test_a_misspelt_name_is_an_error_with_the_nearest(place: str) -> None:
    call, nearest = PLACES[place]
    with pytest.raises(VerlError, match=nearest if "'" in nearest or ":" in nearest else f"did you mean '.*{nearest}'"):
        call()


def test_what_matches_is_taken() -> None:
    for changes in (
        {"modules_to_save": ["lm_head"], "layers_to_transform": 1, "layers_pattern": "layers"},
        {"target_modules": r".*q_p", "trainable_token_indices": [1, 2]},
        {"target_modules": "all-linear", "rank_pattern": {"layers.0.mlp.*": 2}},
        # peft names both heads of a classifier, of which a model has one.
        {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]},
    ):
        adapters(**changes)
    environment("shop")
    by_source("lighteval/MATH")
    # Evaluations and other tasks are logged later.
    check_logged("guard", "eval/accuracy", ["reward/accuracy", "loss"])
    check_logged("guard", "task/b/reward", ["task/a/reward"])


def test_a_misspelt_target_ends_at_every_entry(tiny: Path, tmp_path: Path) -> None:
    wrong, says = ["q_porj", "v_proj"], "did you mean 'q_proj'"
    model = AutoModelForCausalLM.from_pretrained(tiny)
    with pytest.raises(ConfigError, match=says):
        verl.Actor(str(tiny), lora={"targets": wrong})
    with pytest.raises(ConfigError, match=says):
        verl.Critic(str(tiny), lora={"targets": wrong})
    with pytest.raises(ConfigError, match=f"peft_config.target_modules.*{says}"):
        verl.Actor(
            peft.get_peft_model(model, peft.LoraConfig(target_modules=wrong)), AutoTokenizer.from_pretrained(tiny)
        )
    arguments = SFTConfig(output_dir=str(tmp_path), max_steps=1, report_to="none")
    with pytest.raises(ConfigError, match=f"peft_config.target_modules.*{says}"):
        SFTTrainer(
            str(tiny), arguments, train_dataset=[{"prompt": "a", "completion": "b"}],
            peft_config=peft.LoraConfig(target_modules=wrong),
        )  # fmt: skip


def test_an_environment_that_is_not_there_ends_the_step(tiny: Path) -> None:
    """Also where no reward of environments looks at the first rows: in tools alone, or in a later step."""
    episode = verl.EnvironmentEpisode({"shop": Shop, "bank": Shop}, chat_template="hermes")
    actor = verl.Actor(str(tiny), sampling={"max_new_tokens": 4}, episode=episode)
    trainer = verl.Trainer(actor, algorithm="grpo", n=2, log_dir=False)
    trainer.step([{"prompt": "a", "environment": "shop"}])
    with pytest.raises(DataError, match="'shpo': did you mean 'shop'"):
        trainer.step([{"prompt": "a", "environment": "shpo"}])


class Down(Shop):
    def reset(self, **row: Any) -> None:
        raise ConnectionError("refused")


def test_an_environment_that_is_down_ends_the_run(tiny: Path) -> None:
    for bound, says in ((0.5, "4 of 4 episodes.*ConnectionError.*more than max_left_out=0.5"), (1.0, "")):
        episode = verl.EnvironmentEpisode(Down, chat_template="hermes", max_left_out=bound)
        actor = verl.Actor(str(tiny), sampling={"max_new_tokens": 4}, episode=episode)
        trainer = verl.Trainer(actor, algorithm="grpo", n=4, log_dir=False)
        with pytest.raises(RolloutError, match=says) if says else nullcontext():
            trainer.step(["a"])
