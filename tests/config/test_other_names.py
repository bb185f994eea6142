"""The settings of volcengine/verl under their own names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import forked
from verl.algorithms import algorithm_names, make_algorithm
from verl.config import describe, load_config
from verl.config.load import OF_OTHERS
from verl.config.other_names import NAMES, OWN
from verl.config.unused_names import REFUSED, UNUSED
from verl.errors import ConfigError

ROOT = Path(__file__).parents[2]
#: Keys of verl's GRPO and PPO scripts, with usual values.
KEYS = (Path(__file__).parent / "verl_keys.txt").read_text().split("\n")[:-1]
BASE = ["actor_rollout_ref.model.path=MODEL", "data.train_files=train.parquet"]


def error(*overrides: str) -> str:
    with pytest.raises(ConfigError) as told:
        load_config(None, overrides)
    return str(told.value)


def is_taken(key: str) -> bool:
    beside = {"trainer.test_freq": ["data.val_files=test.parquet"]}.get(key.partition("=")[0], [])
    others = [one for one in [*BASE, *beside] if one.partition("=")[0] != key.partition("=")[0]]
    try:
        load_config(None, [*others, key])
    except ConfigError:
        return False
    return True


def test_how_many_keys_are_taken() -> None:
    taken = [key for key in KEYS if is_taken(key)]
    print(f"verl keys: {len(taken)} of {len(KEYS)}")
    assert set(KEYS) - set(taken) == {"actor_rollout_ref.actor.ppo_micro_batch_size=128"}


def test_settings_under_our_names_alone_read_no_table_of_others() -> None:
    ours = [key.path for key in describe()]
    kinds = [type(make_algorithm(name)) for name in algorithm_names()]
    options = {f"algorithm.{name}" for kind in kinds for name in signature(kind).parameters}
    assert not options & {f"algorithm.{name}" for name in OF_OTHERS}
    theirs = {*NAMES, *" ".join((*UNUSED.values(), *REFUSED)).split()}
    assert {*OF_OTHERS} == {name[10:] for name in theirs - options if re.fullmatch(r"algorithm\.\w+", name)}
    shared = {name for name in NAMES for key in ours if f"{name}.".startswith(f"{key}.") or key.startswith(f"{name}.")}
    assert shared | (NAMES.keys() & options) == OWN
    code = "import sys; from verl.config import load_config as read; read(None, sys.argv[1:]); print(*sys.modules)"
    for more, is_read in (["algorithm.kl_in=none", False], ["trainer.experiment_name=a", True]):
        settings = ["actor_rollout_ref.model.path=MODEL", "data.train.path=train.parquet", "reward.name=math", more]
        run = subprocess.run([sys.executable, "-c", code, *settings], capture_output=True, text=True, check=True)
        assert ("verl.config.other_names" in run.stdout.split()) == is_read


def test_names_and_values_are_translated() -> None:
    without = ("algorithm.adv_estimator", "ppo_micro_batch_size=", "trainer.total_epochs", "lora")
    config = load_config(None, ["algorithm.adv_estimator=grpo", *(k for k in KEYS if not any(w in k for w in without))])
    actor, rollout, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer
    assert config.algorithm.name == "grpo"
    options = {"kl_in": "loss", "kl_coef": 0.001, "kl_estimator": "low_var_kl", "clip_ratio": 0.2}
    assert options.items() <= config.algorithm.options.items()
    assert (actor.mini_batch_size, actor.micro_batch_size, actor.max_tokens_per_micro_batch) == (8, 2, 16384)
    assert (actor.strategy, actor.optim.max_grad_norm, actor.optim.warmup_steps) == ("fsdp", 1.0, 0)
    assert (rollout.max_new_tokens, rollout.n, rollout.top_k) == (8, 2, 0)
    assert (config.data.batch_size, config.data.truncation, config.data.prompt_column) == (4, "drop", "prompt")
    assert (config.data.train, config.data.eval) == ({"path": ["train.parquet"]}, "test.parquet")
    assert config.reward.origins() == ["path"] and config.reward.path == "score.py:compute_score"
    assert (trainer.total_steps, trainer.save_every, trainer.eval_every, trainer.eval_temperature) == (3, None, 5, 0.6)
    assert (trainer.loggers, trainer.project, trainer.run_name, trainer.placement) == (
        ("console",), "verl", "gsm8k", None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        (["algorithm.adv_estimator=gae"], "name", "ppo"),
        (["algorithm.adv_estimator=rloo"], "kl_in", "none"),
        (["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True"], "kl_in", "reward"),
        (["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.3"], "kl_coef", 0.3),
        (["actor_rollout_ref.actor.use_kl_loss=True", "algorithm.kl_ctrl.kl_coef=0.3"], "kl_coef", None),
    ],
)
def test_the_kl_counts_where_their_switches_say(given: list[str], key: str, value: object) -> None:
    algorithm = load_config(None, [*BASE, *given]).algorithm
    assert {"name": algorithm.name, **algorithm.options}.get(key) == value


def test_what_means_something_else_is_refused_with_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert "write ppo_micro_batch_size_per_gpu" in error(*BASE, "actor_rollout_ref.actor.ppo_micro_batch_size=128")
    assert "reward.path" in error(*BASE, "reward_model.reward_manager=collabllm")
    assert "data.train: is given twice, as train_files too" in error(*BASE, "data.train=a.jsonl")
    for key in ("data.train_batch_size={}", "trainer.n_gpus_per_node=x", "algorithm.adv_estimator=[1]"):
        assert key.partition("=")[0].rpartition(".")[2] in error(*BASE, key) or key in error(*BASE, key)
    assert load_config(None, [*BASE, "trainer.n_gpus_per_node=8"]).trainer.placement == "cuda:0-7"
    assert load_config(None, [*BASE, "+trainer.val_before_train=False"]).data.train == "train.parquet"


@pytest.mark.slow
def test_a_run_by_their_keys_alone(tiny: Path, tmp_path: Path) -> None:
    """Their parquet and their reward function: two epochs of eight rows in batches of four are four steps."""
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{i} + 1 ="}],
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"index": i},
        }
        for i in range(8)
    ]
    for name in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(rows if name == "train" else rows[:2]), tmp_path / f"{name}.parquet")
    (tmp_path / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert data_source == 'sums' and ground_truth == str(extra_info['index'] + 1)\n"
        "    return float(len(solution_str))\n"
    )
    left_out = (
        "ppo_micro_batch_size=",
        "trainer.total_training_steps",
        "lora",
        "strategy",
        "trainer.test_freq",
        "val_files",
        "critic.",
    )
    keys = [key.replace("MODEL", str(tiny)) for key in KEYS if not any(word in key for word in left_out)]
    done = forked.run(
        [sys.executable, "-m", "verl", "train", *keys],
        cwd=tmp_path, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 4/4" in done.stdout and "of no effect here" in done.stderr


LAUNCH = ["data.train_files=train.parquet", "data.train_batch_size=8", "actor_rollout_ref.model.path=x"]


@pytest.mark.parametrize(
    ("more", "dtypes"),
    [
        ([], ("float32", "float32")),
        (["algorithm.adv_estimator=grpo"], ("float32", "auto")),
        (["actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"], ("bfloat16", "float32")),
        (["actor_rollout_ref.model.dtype=bfloat16", "critic.model.dtype=bfloat16"], ("bfloat16", "bfloat16")),
        (["actor_rollout_ref.actor.strategy=megatron", "critic.strategy=megatron"], ("auto", "auto")),
    ],
)
def test_a_script_that_says_no_precision_trains_in_that_of_verl(more: list[str], dtypes: tuple[str, str]) -> None:
    config = load_config(None, [*LAUNCH, *more])
    assert (config.actor_rollout_ref.model.dtype, config.critic.model.dtype) == dtypes


def test_settings_that_are_no_script_keep_the_precision_of_the_files() -> None:
    config = load_config(None, ["data.train=train.parquet", "data.batch_size=8", "actor_rollout_ref.model.path=x"])
    assert config.actor_rollout_ref.model.dtype == "auto"


@pytest.mark.parametrize("role", ["actor_rollout_ref.actor", "critic"])
def test_a_mini_batch_larger_than_the_batch_is_refused(role: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{role}.ppo_mini_batch_size.*256 is not taken: a mini-batch is a part of the batch of 8"
    ):
        load_config(None, [*LAUNCH, f"{role}.ppo_mini_batch_size=256"])
    config = load_config(None, LAUNCH)  # whose default is larger, too
    assert config.actor_rollout_ref.actor.mini_batch_size == config.critic.mini_batch_size == 8
