"""A script's command line and YAML file, by TRL's records."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from verl.errors import ConfigError
from verl.trl import (
    DPOConfig,
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    TrlParser,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
)


def test_a_command_line_goes_before_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOUR", "none")
    (tmp_path / "a.yaml").write_text(
        "env: {COLOUR: red}\nlearning_rate: 0.5\nmax_steps: 3\ndataset_name: here\nuse_peft: true\n"
    )
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    line = [
        "--config",
        str(tmp_path / "a.yaml"),
        "--max_steps",
        "4",
        "--lora_target_modules",
        "q_proj",
        "--lora_r",
        "2",
        "--eval_steps",
        "0.25",
    ]
    script, training, model = parser.parse_args_and_config(line)
    assert (training.learning_rate, training.max_steps, script.dataset_name, os.environ["COLOUR"]) == (
        0.5,
        4,
        "here",
        "red",
    )
    assert training.eval_steps == 0.25, "a share of all steps"
    adapters = get_peft_config(model)
    assert (adapters.r, adapters.lora_alpha, adapters.target_modules) == (2, 32, "q_proj")


def test_what_a_file_has_of_no_record(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("max_stps: 3\n")
    line = ["--config", str(tmp_path / "a.yaml"), "--more", "1"]
    with pytest.raises(ConfigError, match="--config has 'max_stps', which is of no record: did you mean 'max_steps'"):
        TrlParser(DPOConfig).parse_args_and_config(line)
    args, rest = TrlParser(DPOConfig).parse_args_and_config(line, return_remaining_strings=True)
    assert isinstance(args, DPOConfig) and rest == ["--max_stps", "3", "--more", "1"]
    assert len(TrlParser(DPOConfig).parse_args_and_config(line, fail_with_unknown_args=False)) == 1


def test_models_in_few_bits_are_refused_by_name() -> None:
    assert get_quantization_config(ModelConfig()) is None and get_kbit_device_map() is None
    assert get_peft_config(ModelConfig()) is None
    with pytest.raises(ConfigError, match="load_in_4bit: train adapters over 4 bits"):
        get_quantization_config(ModelConfig(load_in_4bit=True))
    with pytest.raises(ConfigError, match="two forms of one model"):
        ModelConfig(load_in_4bit=True, load_in_8bit=True)


def test_a_setting_of_theirs_is_never_passed_over(tmp_path: Path) -> None:
    """TRL's scripts take what no record has for settings of others."""
    parser = TrlParser((ScriptArguments, SFTConfig))
    for line, message in (
        (["--packing"], "SFTConfig: packing=True is not done here: batches are counted in rows"),
        (["--eos_token=<|im_end|>"], "eos_token='<|im_end|>' is not done here: set the tokenizer's eos_token"),
        (["--optim_args", "rank=2"], "optim_args='rank=2' is not done here"),
    ):
        with pytest.raises(ConfigError, match=message.replace("|", r"\|")):
            parser.parse_args_and_config(line, fail_with_unknown_args=False)
    line = [
        "--packing",
        "False",
        "--no_remove_unused_columns",
        "--resume_from_checkpoint",
        "out/step-000002",
        "--x",
        "1",
    ]
    _, training, left = parser.parse_args_and_config(line, return_remaining_strings=True)
    assert left == ["--x", "1"] and training.resume_from_checkpoint == "out/step-000002"
    assert training.remove_unused_columns is False
    with pytest.raises(ConfigError, match="'--max_stps' is of no record: did you mean 'max_steps'"):
        parser.parse_args_and_config(["--max_stps", "3"])
