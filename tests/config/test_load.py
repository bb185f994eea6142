"""Reading settings: overrides, references, and errors that name key, place and remedy."""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from verl.config import build_config, describe, load_config, to_yaml
from verl.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.yaml"))
RECIPE = """\
actor_rollout_ref:
  model:
    path: models/tiny
  rollout:
    n: 4
data:
  train: {task: chain_sum, size: 10}
trainer:
  total_steps: 3
"""


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return file


def message(file, *overrides):
    with pytest.raises(ConfigError) as error:
        load_config(file, overrides)
    return str(error.value).removeprefix(f"{file}: ")


def edited(recipe, old, new):
    assert old in RECIPE
    recipe.write_text(RECIPE.replace(old, new))
    return recipe


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_examples_load(file):
    assert load_config(file).actor_rollout_ref.model.path


def test_the_end_of_a_text_is_no_comment(recipe):
    for text in ("Solve {prompt} Answer behind ####", "# One"):
        with pytest.raises(ConfigError, match=r"override .data.prompt_template.: .#.* would be a comment"):
            load_config(recipe, [f"data.prompt_template={text}"])
    config = load_config(recipe, ["data.prompt_template='{prompt} # x'", "trainer.output_dir=runs/#1"])
    assert config.data.prompt_template == "{prompt} # x" and config.trainer.output_dir == "runs/#1"


def test_overrides_replace_what_the_file_says(recipe):
    config = load_config(
        recipe,
        [
            "trainer.seed=3",
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "actor_rollout_ref.rollout.stop=['</answer>', end]",
            "data.train.size=20",
            "reward.path=my_rewards.py:score",
            "trainer.loggers=[]",
            "algorithm.kl_coef=0.1",
            "actor_rollout_ref.actor.max_tokens_per_micro_batch=null",
        ],
    )
    assert config.trainer.seed == 3
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.actor_rollout_ref.rollout.stop == ("</answer>", "end")
    assert config.data.train == {"task": "chain_sum", "size": 20}
    assert config.reward.path == "my_rewards.py:score"
    assert config.trainer.loggers == ()
    assert config.algorithm.options == {"kl_coef": 0.1}
    assert config.actor_rollout_ref.actor.max_tokens_per_micro_batch is None
    assert config.trainer.total_steps == 3
    assert load_config(recipe, ["data.train=other.jsonl"]).data.train == "other.jsonl"


def test_a_mapping_is_merged_and_null_takes_a_key_out(recipe):
    assert load_config(recipe, ["data.train={size: 20}"]).data.train == {"task": "chain_sum", "size": 20}
    assert load_config(recipe, ["data.train={task: null, path: a.jsonl, size: null}"]).data.train == {"path": "a.jsonl"}
    edited(recipe, "trainer:", "reward: {name: task}\ntrainer:")
    assert message(recipe, "reward.path=a.py:f") == (
        "reward: give one of path, name, model, url and components, not path (override 'reward.path=a.py:f') and "
        "name (recipe.yaml line 8); KEY=null takes one out"
    )
    assert load_config(recipe, ["reward.path=a.py:f", "reward.name=null"]).reward.origins() == ["path"]


def test_names_that_others_use(recipe):
    key = "actor_rollout_ref.rollout.rollout_per_device_batch_size"
    config = load_config(recipe, ["data.rollout_batch_size=8", f"{key}=5"])
    assert (config.data.batch_size, config.actor_rollout_ref.rollout.max_num_seqs) == (8, 5)
    wrong = "data.batch_size: must be at least 1, not 0 (override 'data.rollout_batch_size=0')"
    assert message(recipe, "data.rollout_batch_size=0") == wrong
    told = message(recipe, "data.batch_size=4", "data.rollout_batch_size=8")
    assert told.startswith("data.batch_size: is given twice, as rollout_batch_size too (override 'data.rollout_batch_")
    assert load_config(recipe, ["data.rollout_batch_size=8"]) == load_config(recipe, ["data.batch_size=8"])


def test_a_tilde_is_the_home_directory(recipe, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(
        recipe,
        ["trainer.output_dir=~/runs", "data.train=~/a.jsonl", "data.eval={path: ~/b.jsonl}", "reward.path=~/r.py:f"],
    )
    assert (config.trainer.output_dir, config.reward.path) == ("/home/me/runs", "/home/me/r.py:f")
    assert (config.data.train, config.data.eval) == ("/home/me/a.jsonl", {"path": "/home/me/b.jsonl"})


def test_references_to_other_keys(recipe):
    edited(recipe, "total_steps: 3", "total_steps: 3\n  keep_checkpoints: ${trainer.total_steps}")
    assert load_config(recipe).trainer.keep_checkpoints == 3
    assert "nowhere" in message(recipe, "trainer.seed=${nowhere}")


GOLDEN = [
    (
        ["trainer.total_step=3"],
        "trainer.total_step: unknown key; did you mean 'trainer.total_steps'? (override 'trainer.total_step=3')",
    ),
    (["data.seed=3"], "data.seed: unknown key; did you mean 'trainer.seed'? (override 'data.seed=3')"),
    (
        ["actor_rollout_ref.max_new_token=3"],
        "actor_rollout_ref.max_new_token: unknown key; did you mean 'actor_rollout_ref.rollout.max_new_tokens'? "
        "(override 'actor_rollout_ref.max_new_token=3')",
    ),
    (
        ["qqq=1"],
        "qqq: unknown key; known: actor_rollout_ref, algorithm, cost, critic, data, reward, tasks, trainer "
        "(override 'qqq=1')",
    ),
    (["trainer.seed=abc"], "trainer.seed: must be a whole number, not 'abc' (override 'trainer.seed=abc')"),
    (["trainer.seed=1.5"], "trainer.seed: must be a whole number, not 1.5 (override 'trainer.seed=1.5')"),
    (["trainer.seed=-1"], "trainer.seed: must be at least 0, not -1 (override 'trainer.seed=-1')"),
    (
        ["trainer.seed=4294967296"],
        "trainer.seed: must be less than 4294967296, not 4294967296 (override 'trainer.seed=4294967296')",
    ),
    (["trainer.seed=true"], "trainer.seed: must be a whole number, not true (override 'trainer.seed=true')"),
    (["data.shuffle=3"], "data.shuffle: must be true or false, not 3 (override 'data.shuffle=3')"),
    (["data.eval=3"], "data.eval: must be text or a mapping or null, not 3 (override 'data.eval=3')"),
    (
        ["data.truncation=cut"],
        "data.truncation: must be one of left, right, drop, error, not 'cut' (override 'data.truncation=cut')",
    ),
    (["data.batch_size=0"], "data.batch_size: must be at least 1, not 0 (override 'data.batch_size=0')"),
    (
        ["reward.name=tasks"],
        "reward.name: no reward is called 'tasks': did you mean 'task'? (override 'reward.name=tasks')",
    ),
    (
        ["actor.optim.lr=1e-5"],
        "actor: unknown key; did you mean 'actor_rollout_ref.actor.optim.lr'? (override 'actor.optim.lr=1e-5')",
    ),
    (
        ["optim.lr=1e-5"],
        "optim: unknown key; did you mean 'actor_rollout_ref.actor.optim.lr' or 'critic.optim.lr'? "
        "(override 'optim.lr=1e-5')",
    ),
    (
        ["actor_rollout_ref.rollout.stop=['']"],
        "actor_rollout_ref.rollout.stop.0: must be a text that is not empty, not '' "
        "(override 'actor_rollout_ref.rollout.stop=['']')",
    ),
    (
        ["actor_rollout_ref.rollout.temperature=1e-9"],
        "actor_rollout_ref.rollout.temperature: must be at least 1e-06, not 1e-09 "
        "(override 'actor_rollout_ref.rollout.temperature=1e-9')",
    ),
    (
        ["trainer.eval_temperature=1e9"],
        "trainer.eval_temperature: must be 0 (greedy) or lie between 1e-06 and 1000000, not 1000000000.0 "
        "(override 'trainer.eval_temperature=1e9')",
    ),
    (["trainer=3"], "trainer: must be a group of settings, not 3 (override 'trainer=3')"),
    (
        ["actor_rollout_ref.model={path: 1}"],
        "actor_rollout_ref.model.path: must be text or null, not 1 (override 'actor_rollout_ref.model={path: 1}')",
    ),
    (
        ["actor_rollout_ref.rollout.gpus_per_rollout_worker=2"],
        "actor_rollout_ref.rollout.gpus_per_rollout_worker: only GPUs can show it, and it has not been shown, so only "
        "null is possible here "
        "(override 'actor_rollout_ref.rollout.gpus_per_rollout_worker=2')",
    ),
    (
        ["actor_rollout_ref.rollout.n.x=1"],
        "actor_rollout_ref.rollout.n: must be a whole number, not {'x': 1} "
        "(override 'actor_rollout_ref.rollout.n.x=1')",
    ),
    (
        ["actor_rollout_ref.model.fused_kernel_option.impl_backend=x"],
        "actor_rollout_ref.model.fused_kernel_option: unknown key; did you mean "
        "'actor_rollout_ref.model.fused_kernel_options'? "
        "(override 'actor_rollout_ref.model.fused_kernel_option.impl_backend=x')",
    ),
    (
        ["data.train.task=null"],
        "data.train: must name either a task (task: NAME) or a file (path: FILE) (override 'data.train.task=null')",
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), GOLDEN, ids=[overrides[0] for overrides, _ in GOLDEN])
def test_messages(recipe, overrides, expected):
    assert message(recipe, *overrides) == expected


def test_a_wrong_key_in_the_file_is_found_by_its_line(recipe):
    edited(recipe, "    n: 4", "    n: 4\n    temprature: 1.0")
    assert message(recipe) == (
        "actor_rollout_ref.rollout.temprature: unknown key; did you mean 'actor_rollout_ref.rollout.temperature'? "
        "(recipe.yaml line 6)"
    )


def test_all_problems_are_told_at_once(recipe):
    text = message(recipe, "trainer.seed=x", "data.bach_size=2")
    assert text.startswith("2 problems")
    assert "trainer.seed: must be" in text
    assert "'data.batch_size'?" in text


def test_no_model(recipe):
    edited(recipe, "    path: models/tiny", "    dtype: float32")
    assert "actor_rollout_ref.model.path: is missing" in message(recipe)
    recipe.write_text("trainer: {seed: 1}")
    assert message(recipe) == "actor_rollout_ref: is missing"
    recipe.write_text("")
    assert message(recipe) == "actor_rollout_ref: is missing"


@pytest.mark.parametrize("override", ["foo", "=3", "--trainer.seed=3", "a..b=1", "a b=2", "trainer.=1"])
def test_what_is_no_override(recipe, override):
    with pytest.raises(ConfigError, match="is no override: write key=value"):
        load_config(recipe, [override])


def test_an_override_whose_value_is_no_yaml_is_named(recipe):
    with pytest.raises(
        ConfigError, match=r"^override 'data\.prompt_template=\{prompt\} x': its value is no YAML: line 1"
    ):
        load_config(recipe, ["data.prompt_template={prompt} x"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("null: 2\n", "Incompatible key"),
        ("a: [1\n", "not valid YAML: line 2"),
        ("a: 1\na: 2\n", "duplicate key a"),
        ("- 1\n", "must hold settings"),
        ("just text", "must hold settings"),
        ("a: !!python/object/apply:os.system [echo]\n", "not valid YAML: line 1"),
    ],
)
def test_files_that_hold_no_settings(recipe, text, expected):
    recipe.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        load_config(recipe)


def test_files_that_are_not_there(recipe):
    with pytest.raises(ConfigError, match=r"recip\.yaml: no such file; did you mean '.*recipe\.yaml'"):
        load_config(recipe.with_name("recip.yaml"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(recipe.parent)
    recipe.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        load_config(recipe)


@pytest.mark.timeout(60)
def test_a_pipe_or_a_device_is_not_read(tmp_path):
    pipe = tmp_path / "recipe.yaml"
    os.mkfifo(pipe)
    for file in (pipe, Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"{file} cannot be read: it is not a regular file"):
            load_config(file)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: " + "[" * 20_000 + "]" * 20_000, r"line 1: nested more than 50 levels deep"),
        ("a: &a [*a]\n", "aliases"),
        ("a: &a [x, x]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghij")),
         "more than 100,000 values"),
        ("a: " + "x" * (1 << 20), "has more than 1 MiB"),
        ("trainer: {1: 2}\n", "trainer.1: a key is text, not 1"),
    ],
    ids=["deep", "endless", "bomb", "large", "number"],
)  # fmt: skip
def test_files_that_are_made_to_harm(recipe, text, expected):
    recipe.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        load_config(recipe)


def test_a_list_may_not_take_a_mapping_s_place(recipe):
    assert message(recipe, "data.train=[a]") == (
        "data.train: must be text or a mapping or null, not ['a'] (override 'data.train=[a]')"
    )
    assert "nested more than 50 levels deep" in message(recipe, "data.train=" + "[" * 20_000 + "]" * 20_000)


ODD = ["true", "[]", "[a]", "{}", "{a: b}", "yes please", ".nan", ".inf", "1e400", "-1", "0", str(10**30), "1.5", "''"]


@examples(150)
@given(key=st.sampled_from([key.path for key in describe()]), value=st.sampled_from(ODD))
def test_any_value_is_taken_or_refused_by_its_key(key, value, tmp_path_factory):
    file = tmp_path_factory.mktemp("odd") / "recipe.yaml"
    file.write_text(RECIPE)
    try:
        config = load_config(file, [f"{key}={value}"])
    except ConfigError as error:
        refused = str(error)
    else:
        refused = None
    if refused is not None:
        assert key.rpartition(".")[0] in refused
        return
    here = config
    for part in key.split("."):
        here = getattr(here, part)
    assert not (isinstance(here, bool) and value not in ("true", "yes please"))
    assert not (isinstance(here, int | float) and abs(here) >= 2**32 and not key.endswith(FREE))


#: What a model or a reward multiplies by has no upper bound.
FREE = ("lr", "adam_eps", "weight_decay", "max_grad_norm", "on_failure")


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.actor.optim.lr=true",
        "critic.optim.warmup_steps=1.5",
        "trainer.deadline=1e300",
        "reward.timeout=1e300",
        "reward.workers=100000",
        "actor_rollout_ref.rollout.num_rollout_workers=100000",
    ],
)
def test_numbers_of_the_wrong_type_or_size(recipe, override):
    key = override.partition("=")[0]
    assert message(recipe, override).startswith(f"{key}: must be ")


def test_what_is_printed_reads_back_to_the_same(recipe, tmp_path):
    config = load_config(recipe, ["algorithm.kl_coef=0.1", "reward.components={a: {path: 'r.py:f', weight: 0.5}}"])
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(again) == config


@examples(60)
@given(text=st.text(st.sampled_from("\\${}:.# '\"\n\téab"), max_size=12))
def test_any_text_survives_printing_and_reading(text, tmp_path_factory):
    content = {"actor_rollout_ref": {"model": {"path": "m"}}, "data": {"system_prompt": text}}
    config = build_config(content)
    file = tmp_path_factory.mktemp("config") / "c.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(file).data.system_prompt == text


KEYS = [key.path for key in describe() if "." in key.path and not key.path.startswith("algorithm.")]


@examples(80)
@given(st.sampled_from(KEYS), st.integers(0, 40), st.sampled_from("abcxyz_"))
def test_a_misspelt_key_is_always_named_with_a_valid_one(key, place, letter):
    section, _, name = key.rpartition(".")
    place %= len(name) + 1
    wrong = name[:place] + letter + name[place:]
    if f"{section}.{wrong}" in KEYS:
        return
    content = {wrong: 1}
    for part in reversed(section.split(".")):
        content = {part: content}
    content.setdefault("actor_rollout_ref", {}).setdefault("model", {}).setdefault("path", "m")
    with pytest.raises(ConfigError) as error:
        build_config(content)
    text = str(error.value)
    assert f"{section}.{wrong}: unknown key; did you mean '" in text
    assert text.split("did you mean '")[1].split("'")[0] in KEYS + [k.rpartition(".")[0] for k in KEYS]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("010", r"010 would be 8, a number in base 8: write 10, or '010' in quotes"),
        ("-0_17", r"-0_17 would be -15, a number in base 8: write -17"),
        ("1:30", r"1:30 would be 90, a number in base 60: write '1:30' in quotes"),
        ("190:20:30.15", r"190:20:30.15 would be 685230.15, a number in base 60"),
    ],
)
def test_numbers_that_yaml_reads_in_another_base_are_refused(tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(f"trainer:\n  total_steps: {text}\n")
    with pytest.raises(ConfigError, match=f"recipe.yaml: line 2: {fault}"):
        load_config(file)
    file.write_text(f"data:\n  columns: {{a: [{text}]}}\n")
    with pytest.raises(ConfigError, match=f"recipe.yaml: line 2: {fault}"):
        load_config(file)
    with pytest.raises(ConfigError, match=f"override 'trainer.total_steps': line 1: {fault}"):
        load_config(None, [f"trainer.total_steps={text}"])


@pytest.mark.parametrize(
    ("text", "value"), [("0", 0), ("10", 10), ("1_000", 1000), ("0x10", 16), ("'010'", "010"), ("0.5", 0.5)]
)
def test_numbers_that_read_as_they_are_written_are_taken(tmp_path: Path, text: str, value: Any) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(f"actor_rollout_ref: {{model: {{path: x}}}}\ndata: {{train: {{task: t, seed: {text}}}}}\n")
    source = load_config(file).data.train
    assert isinstance(source, dict) and source["seed"] == value
