"""The schema: small, documented, frozen; what is not built yet is refused; what identifies a run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from verl.config import Config, build_config, commented_yaml, config_hash, describe, load_config, markdown, run_id
from verl.errors import ConfigError
from verl.run.build import check_settings

MODEL = {"actor_rollout_ref": {"model": {"path": "models/tiny"}}}


def config(**sections):
    return build_config({**MODEL, **sections})


def problem(**sections):
    with pytest.raises(ConfigError) as error:
        config(**sections)
    return str(error.value)


def policy(**parts):
    return {"actor_rollout_ref": {"model": {"path": "models/tiny"}, **parts}}


def test_there_are_at_most_170_settings():
    keys = [key.path for key in describe()]
    assert len(keys) == len(set(keys))
    assert 100 < len(keys) <= 170


def test_every_key_says_what_it_is_for():
    assert [key.path for key in describe() if len(key.description) < 8] == []


def test_importing_the_schema_imports_no_heavy_library():
    code = "import sys, verl.config; print(sorted({'torch', 'transformers', 'ray', 'vllm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_documented_tree_is_the_schema():
    import yaml

    tree = yaml.safe_load(commented_yaml())
    tree["actor_rollout_ref"]["model"]["path"] = "models/tiny"
    for optim in (tree["actor_rollout_ref"]["actor"]["optim"], tree["critic"]["optim"]):
        optim.update({name: float(optim[name]) for name in ("lr", "adam_eps")})  # PyYAML reads 1e-06 as text
    assert build_config(tree) == config()


def test_markdown_has_a_row_for_each_key():
    keys = []
    for section, table in re.findall(r"^## (\S+)\n\n(.*?)\n\n", markdown() + "\n", re.DOTALL | re.MULTILINE):
        names = [row.split("`")[1] for row in table.splitlines()[2:]]
        keys += [name if name == section else f"{section}.{name}" for name in names]
    assert keys == [key.path for key in describe()]


def test_the_page_of_the_settings_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text() == markdown(), "run: verl config --markdown > docs/config.md"


def test_a_config_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        config().trainer.seed = 1


NOT_YET = [key for key in describe() if key.later]


@pytest.mark.parametrize("key", NOT_YET, ids=[key.path for key in NOT_YET])
def test_what_is_not_built_is_accepted_at_its_default_and_else_refused(key):
    other = {bool: not key.default, int: 2, str: "fsdp", type(None): 2 if "number" in key.type else "bf16"}

    def tree(value):
        for part in reversed(key.path.split(".")):
            value = {part: value}
        value.setdefault("actor_rollout_ref", {}).setdefault("model", {})["path"] = "models/tiny"
        return value

    assert isinstance(build_config(tree(key.default)), Config)
    with pytest.raises(ConfigError) as error:
        build_config(tree(other[type(key.default)]))
    assert key.path in str(error.value)
    assert key.later in str(error.value)


def test_only_what_takes_gpus_to_show_is_marked():
    assert {key.path: key.later for key in NOT_YET} == {
        "actor_rollout_ref.rollout.gpus_per_rollout_worker": "only GPUs can show it, and it has not been shown",
    }


def test_the_engine_is_one_of_ours_or_of_a_file():
    assert "did you mean 'vllm'?" in problem(**policy(rollout={"name": "vlm"}))
    assert "FILE.py:FUNCTION" in problem(**policy(rollout={"name": "engine.txt:Mine"}))
    assert "'hf' does not split a model" in problem(**policy(rollout={"name": "hf", "tensor_model_parallel_size": 2}))
    for name in ("auto", "embedded", "vllm", "engines/mine.py:Mine"):
        Config(**policy(rollout={"name": name, "tensor_model_parallel_size": 2}))


def test_settings_that_contradict_each_other():
    assert "rollout.num_rollout_workers: is for asynchronous training" in problem(
        **policy(rollout={"num_rollout_workers": 2})
    )
    assert "rollout.max_rollout_workers: is for asynchronous training" in problem(
        **policy(rollout={"max_rollout_workers": 2})
    )
    assert "max_rollout_workers: must be at least num_rollout_workers (3)" in problem(
        **policy(rollout={"num_rollout_workers": 3, "max_rollout_workers": 2})
    )
    for wrong in ({"max_workers": 2}, {"workers": 4, "max_workers": 2}):
        assert "reward.max_workers: is the most" in problem(**policy(), reward={"path": "rewards.py:f", **wrong})
    assert "rollout.min_new_tokens: must be at most max_new_tokens (4)" in problem(
        **policy(rollout={"min_new_tokens": 5, "max_new_tokens": 4})
    )
    assert "rollout.url: is of vLLM servers: leave rollout.name=hf out" in problem(
        **policy(rollout={"name": "hf", "url": ["http://localhost:1"]})
    )
    Config(**policy(rollout={"url": ["http://localhost:1"], "batch_invariant": True}))
    assert "rollout.batch_invariant: is for the embedded engine" in problem(
        **policy(rollout={"name": "hf", "batch_invariant": True})
    )
    assert "critic.mini_batch_size: must be at most the 16 samples" in problem(
        **policy(rollout={"n": 8}), data={"batch_size": 2}, critic={"mini_batch_size": 17}
    )
    assert "trainer.eval_every: is set, but data.eval" in problem(trainer={"eval_every": 5})
    guards = [{"monitor_metrics": ["reward"]}]
    Config(**policy(), trainer={"guards": guards})
    assert "trainer.guards: go back between synchronous steps" in problem(
        trainer={"guards": guards, "max_staleness": 1}
    )
    for wrong, words in (
        ({"monitor_metrics": []}, "monitor_metrics: is empty"),
        ({"monitor_metrics": ["a"], "threshold_delta": 0.0}, "threshold_delta: is 0"),
        (
            {"monitor_metrics": ["a"], "rollback_step": 3},
            "unknown key; did you mean 'trainer.guards.0.rollback_steps'?",
        ),
    ):
        assert words in problem(trainer={"guards": [wrong]})
    shares = {"initial_weights": {"a": 1.0, "b": 1.0}}
    assert "trainer.task_scheduler: weighs several tasks" in problem(trainer={"task_scheduler": shares})
    assert "trainer.task_scheduler.patience: must be" in problem(trainer={"task_scheduler": {**shares, "patience": 0}})
    tasks = [{"name": name, "type": "grpo", "reward_model": "math"} for name in ("a", "bb")]
    assert "trainer.task_scheduler: weighs task 'b': did you mean 'bb'?" in problem(
        tasks=tasks, trainer={"task_scheduler": shares}
    )
    assert "data.train: must name either a task" in problem(data={"train": {"size": 3}})
    for weights in ([1], [1, 2, 3], 0.5):
        mixed = {"path": ["a.jsonl", "b.jsonl"], "weights": weights}
        assert "data.train: weights are a list of one number for each" in problem(data={"train": mixed})
    for weights in ([1, 0], [1, -1], [1, float("inf")], [1, "2"], [True, 1]):
        mixed = {"path": ["a.jsonl", "b.jsonl"], "weights": weights}
        assert "data.train: weights must be numbers above 0" in problem(data={"train": mixed})
    mixed = {"path": ["a.jsonl", "b.jsonl"], "weights": [1, 2]}
    assert "data.eval: has no weights" in problem(data={"eval": mixed})
    assert "data.train: mixes no files for task 'one'" in problem(data={"train": {"one": mixed}})
    for template in ("Q:", "{{prompt}}"):
        assert "data.prompt_template: must contain {prompt}" in problem(data={"prompt_template": template})
    assert "reward: give one of" in problem(reward={"name": "task", "path": "r.py:f"})
    assert "reward.answer: is for built-in rewards" in problem(reward={"path": "r.py:f", "answer": "tag"})
    assert "reward.components.length: needs exactly one" in problem(reward={"components": {"length": {"weight": 2.0}}})


@pytest.mark.parametrize("name", ["../up", "a/b", "", "a b", ".hidden"])
def test_a_run_name_is_no_path(name):
    assert "trainer.run_name: must be letters" in problem(trainer={"run_name": name})


@pytest.mark.parametrize("path", ["reward.py", "reward.py:", "reward:score", ":score", "reward.py:2x"])
def test_a_function_is_given_by_file_and_name(path):
    assert "reward.path: must be FILE.py:FUNCTION" in problem(reward={"path": path})


def test_numbers_that_are_none_are_refused():
    assert "reward.on_failure" in problem(reward={"on_failure": float("nan")})
    assert "rollout.temperature" in problem(**policy(rollout={"temperature": float("inf")}))


def test_options_of_the_algorithm_pass_through():
    given = config(algorithm={"name": "grpo", "kl_coef": 0.01, "loss_agg_mode": "token-mean"})
    assert given.algorithm.options == {"kl_coef": 0.01, "loss_agg_mode": "token-mean"}


def test_the_hash_is_over_what_changes_the_numbers():
    base = config_hash(config())
    free = {"output_dir": "x", "run_name": "y", "loggers": [], "total_steps": 7, "save_every": 3, "keep_checkpoints": 9}
    assert config_hash(config(trainer=free)) == base
    assert config_hash(config(critic={"epochs": 1})) == base, "a default written out is the same run"
    changed = [
        config(trainer={"seed": 1}),
        config(algorithm={"name": "grpo", "kl_coef": 0.1}),
        config(trainer={"control": "zero_lr"}),
        config(data={"train": "a.jsonl"}),
        config(data={"train": "a.jsonl", "pools": {}}),
        config(**policy(actor={"optim": {"lr": 0.5}})),
        config(critic={"epochs": 2}),
    ]
    assert len({base, *map(config_hash, changed)}) == len(changed) + 1


def test_the_length_counts_where_the_learning_rate_depends_on_it():
    def length(steps, **optim):
        return config_hash(config(**policy(actor={"optim": optim}), trainer={"total_steps": steps}))

    assert length(10, schedule="cosine") != length(20, schedule="cosine")
    assert length(10, schedule="cosine", total_steps=50) == length(20, schedule="cosine", total_steps=50)


def test_the_run_directory_is_named_by_what_it_is_and_the_hash():
    given = config(data={"train": {"task": "chain_sum"}}, algorithm={"name": "grpo"})
    assert run_id(given) == f"grpo-tiny-chain_sum-{config_hash(given)}"
    named = config(trainer={"run_name": "first"})
    assert run_id(named) == f"first-{config_hash(named)}"
    nasty = build_config({"actor_rollout_ref": {"model": {"path": "/x/Ünï M/.."}}, "data": {"train": "/a/b c.jsonl"}})
    assert "/" not in run_id(nasty)
    assert ".." not in run_id(nasty)


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, True),
        ({"use_fused_kernels": False}, False),
        ({"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "xformers"}}, "xformers"),
    ],
)
def test_fused_kernels_reach_the_model(tiny, settings, asked):
    from verl.algorithms import make_algorithm
    from verl.run.build import build_actor

    given = config(actor_rollout_ref={"model": {"path": str(tiny), **settings}})
    actor = build_actor(given, make_algorithm("grpo").head, 8)
    assert actor.train_options.fused_kernels == given.actor_rollout_ref.model.fused_kernels == asked
    assert actor.group.worker._packed.fused_kernels is bool(asked)
    wrong = {"path": "models/tiny", "use_fused_kernels": False, "fused_kernel_options": {"impl_backend": "compiled"}}
    assert "impl_backend: needs use_fused_kernels=true" in problem(actor_rollout_ref={"model": wrong})


def test_a_critic_takes_the_actors_options_of_a_strategy_that_both_have():
    for strategy, size in (("fsdp", 2), ("ddp", -1)):
        found = config(
            **policy(actor={"strategy": "fsdp", "fsdp_config": {"fsdp_size": 2}}),
            critic={"strategy": strategy, "epochs": 3},
        )
        options = found.critic.options(found.actor_rollout_ref.actor)
        assert (options.strategy, options.epochs, options.fsdp_config.fsdp_size) == (strategy, 3, size)


@pytest.mark.parametrize("key", ["data.batch_size", "actor_rollout_ref.rollout.n", "trainer.eval_n"])
def test_a_number_that_no_memory_holds_is_refused_with_its_reason(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: must be at most 1,000,000: all of them are held in memory at once"):
        load_config(None, [f"{key}=1000000000", "actor_rollout_ref.model.path=x"])


def test_a_step_that_no_memory_holds_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "reward.py").write_text("def score(responses):\n    return [1.0] * len(responses)\n")
    config = load_config(
        None,
        [
            f"data.train={tmp_path / 'train.jsonl'}", "data.batch_size=100000", "actor_rollout_ref.rollout.n=1000",
            "actor_rollout_ref.model.path=x", f"reward.path={tmp_path / 'reward.py'}:score",
        ],
    )  # fmt: skip
    with pytest.raises(ConfigError, match="a step would have 100,000,000 rows"):
        check_settings(config)
