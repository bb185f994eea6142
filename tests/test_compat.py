"""Commands of others, translated."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from verl.cli.main import app
from verl.compat.openrlhf import _TABLE, translate
from verl.config import describe
from verl.errors import ConfigError

_PPO = (
    "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path {model} --data.prompt_dataset data.jsonl "
    "--data.input_key input --data.label_key label --reward.remote_url reward_func.py --algo.advantage.estimator rloo "
    "--rollout.batch_size 4 --train.batch_size 8 --rollout.n_samples_per_prompt 4 --actor.adam.lr 5e-7 "
    "--rollout.max_new_tokens 16 --vllm.num_engines 0 --ds.packing_samples --train.colocate_all"
)
_REWARD = "def reward_func(queries, prompts, labels):\n    return [float(len(query)) for query in queries]\n"


def printed(command: str) -> subprocess.CompletedProcess[str]:
    module = [sys.executable, "-m", "verl.compat.openrlhf"]
    return subprocess.run([*module, *shlex.split(command)], capture_output=True, text=True, timeout=120)


def test_what_is_printed_is_what_verl_train_takes(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward_func.py").write_text(_REWARD)
    (tmp_path / "data.jsonl").write_text('{"input": "once", "label": "upon"}\n' * 8)
    done = printed(_PPO.format(model=tiny))
    assert done.returncode == 0, done.stderr
    (tmp_path / "recipe.yaml").write_text(done.stdout)
    plan = CliRunner().invoke(app, ["train", "recipe.yaml", "--dry-run"])
    assert plan.exit_code == 0, plan.output
    settings = yaml.safe_load(done.stdout)
    assert settings["algorithm"] == {
        "name": "rloo", "kl_in": "reward", "kl_coef": 0.01, "kl_target": None, "kl_estimator": "k1",
        "clip_ratio_c": None, "rollout_is": None,
    }  # fmt: skip
    assert settings["actor_rollout_ref"]["actor"]["optim"] == {"lr": 5e-7, "betas": [0.9, 0.95], "adam_eps": 1e-8}
    assert settings["actor_rollout_ref"]["rollout"] == {"n": 4, "max_new_tokens": 16}
    assert settings["trainer"] == {"total_epochs": 1, "seed": 42, "save_every": None}
    assert settings["reward"] == {"path": "reward_func.py:reward_func"} and "critic" not in settings
    assert "# there is no warm-up here; there it takes 3 % of the steps\n" in done.stdout


@pytest.mark.slow
def test_recorded_rows_under_names_of_their_own(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.jsonl").write_text('{"input": "once", "better": " upon", "worse": " a"}\n' * 4)
    done = printed(
        f"train_dpo --model.model_name_or_path {tiny} --data.dataset pairs.jsonl --data.prompt_key input "
        "--data.chosen_key better --data.rejected_key worse --train.batch_size 2 --model.beta 0.2"
    )
    assert done.returncode == 0, done.stderr
    (tmp_path / "recipe.yaml").write_text(done.stdout)
    plan = CliRunner().invoke(app, ["train", "recipe.yaml", "--dry-run"])
    assert plan.exit_code == 0, plan.output
    missing = CliRunner().invoke(app, ["train", "recipe.yaml", "data.columns={chosen: best}", "--dry-run"])
    assert missing.exit_code and "there is no column 'best' (data.columns)" in missing.output


def test_flags_of_before_are_known_by_their_new_names() -> None:
    settings, _ = translate(
        shlex.split("--pretrain M --n_samples_per_prompt 8 --lora_rank 8 --eps_clip_low_high 0.1 0.3")
    )
    assert settings["actor_rollout_ref.model.path"] == "M" and settings["actor_rollout_ref.rollout.n"] == 8
    assert settings["actor_rollout_ref.model.lora.r"] == 8
    assert (settings["algorithm.clip_ratio_low"], settings["algorithm.clip_ratio_high"]) == (0.1, 0.3)
    assert settings["algorithm.name"] == "ppo" and settings["critic.optim.lr"] == 9e-6


def test_a_whole_command_names_its_script() -> None:
    flags = ["--model.model_name_or_path", "model"]
    plain, _ = translate(["train_sft", *flags])
    for words in ("python3 -m", "deepspeed --module", "ray job submit --address=http://127.0.0.1:8265 -- python3 -m"):
        assert translate([*words.split(), "openrlhf.cli.train_sft", *flags])[0] == plain
    for word in ("openrlhf.cli.train_kto", "train_kd"):
        with pytest.raises(ConfigError, match="nothing here takes the place of OpenRLHF's train_k"):
            translate([word, *flags])


def test_all_that_has_no_meaning_here_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        translate(shlex.split("--pretrain M --train.async_enable --rollout.temperatur 1 --actor.optim muon"))
    said = str(caught.value)
    assert "--train.async_enable: " in said and "trainer.max_staleness" in said
    assert "did you mean --rollout.temperature?" in said and "--actor.optim: 'muon'" in said
    done = printed("--pretrain M --train.async_enable")
    assert done.returncode == 1 and done.stderr.startswith("error: --train.async_enable") and not done.stdout


@pytest.mark.parametrize("values", ["0.1", "0.1 0.2 0.3", ""])
def test_a_flag_of_two_values_takes_two(values: str) -> None:
    with pytest.raises(ConfigError, match=r"--actor\.eps_clip_low_high: takes 2 values"):
        translate(shlex.split(f"--pretrain M --eps_clip_low_high {values}"))


def test_the_table_names_settings_that_there_are() -> None:
    table = yaml.safe_load(_TABLE.read_text())
    keys = {key.path for key in describe()}
    parts = {key[:i] for key in keys for i, letter in enumerate(key) if letter == "."} | keys
    for script in ("train_ppo_ray", "train_sft", "train_dpo", "train_rm"):
        flags = table[script]["flags"]
        assert {*table[script]["defaults"], *table[script]["notes"]} <= flags.keys()
        for flag, to in flags.items():
            if isinstance(to, dict):
                to = [to["key"], *to.get("with", {})] if "key" in to else to.get("each")
            names = to
            for name in [names] if isinstance(names, str) else names if isinstance(names, list) else []:
                known = name is None or name in parts or name.startswith(("algorithm.", "data.columns."))
                known = known or name.rpartition(".")[0] in parts  # of a group of settings, such as model.lora
                assert known, f"{script} --{flag}: {name}"
    assert {*table["former"].values()} <= table["train_ppo_ray"]["flags"].keys()
