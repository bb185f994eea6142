"""TRL's `*Config` records as dataclasses, and every field of transformers' own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments

from verl.errors import ConfigError
from verl.trl import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, SFTConfig
from verl.trl.losses import dpo_algorithm, grpo_algorithm
from verl.trl.names import NO_EFFECT, OTHERWISE, REMOVED

RECORDS = [DPOConfig, GRPOConfig, KTOConfig, RewardConfig, SFTConfig]


@pytest.mark.parametrize("record", RECORDS)
def test_a_command_line_is_read_into_a_record(record: Any) -> None:
    line = "--output_dir out --learning_rate 1e-5 --warmup_steps 3 --bf16 --log_completions --dataloader_num_workers 4"
    (args,) = HfArgumentParser((record,)).parse_args_into_dataclasses(line.split())
    assert (args.output_dir, args.learning_rate, args.warmup_steps, args.bf16) == ("out", 1e-5, 3, True)
    same = record(
        output_dir="out",
        learning_rate=1e-5,
        warmup_steps=3,
        bf16=True,
        log_completions=True,
        dataloader_num_workers="4",
    )
    assert dataclasses.asdict(args) == dataclasses.asdict(same)


def test_kinds_that_no_default_shows_are_read() -> None:
    line = [
        "--num_generations",
        "4",
        "--reward_weights",
        "1",
        "0.5",
        "--max_prompt_length",
        "64",
        "--epsilon_high",
        "0.3",
    ]
    line += ["--model_init_kwargs", '{"dtype": "bfloat16"}', "--gradient_checkpointing"]
    (args,) = HfArgumentParser((GRPOConfig,)).parse_args_into_dataclasses(line)
    assert (args.reward_weights, args.max_prompt_length, args.epsilon_high) == ([1.0, 0.5], 64, 0.3)
    assert args.gradient_checkpointing is True and args.model_settings()["dtype"] == "bfloat16"
    assert dataclasses.replace(args, beta=0.5).beta == 0.5


def test_what_is_left_out_is_the_default() -> None:
    for record in RECORDS:
        (args,) = HfArgumentParser((record,)).parse_args_into_dataclasses([])
        assert dataclasses.asdict(args) == dataclasses.asdict(record())


def test_every_field_of_transformers_is_mapped_or_known() -> None:
    """None is dropped in silence: it is mapped, has no effect on numbers, or is refused with what to do."""
    fields = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    known = GRPOConfig.defaults().keys() | NO_EFFECT | OTHERWISE.keys()
    assert not {name for name in fields - known if name not in REMOVED}


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        *[(SFTConfig, name, True) for name in ("packing", "dataloader_drop_last", "save_only_model")],
        *[(config, "disable_dropout", False) for config in (DPOConfig, KTOConfig, RewardConfig)],
        *[(GRPOConfig, name, 2.0) for name in ("vllm_importance_sampling_cap", "entropy_coef_delta", "entropy_target")],
               (DPOConfig, "ref_model_sync_steps", 64), (DPOConfig, "f_alpha_divergence_coef", 0.7),
    ],
)  # fmt: skip
def test_what_would_change_numbers_is_refused_by_name(config: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{config.__name__}: {name}={value!r} is not done here: "):
        config(**{name: value})
    setattr(config(), name, None)  # nobody said anything


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("num_generations", [0, "2", True, None]), ("per_device_train_batch_size", [0, 1.5]),
        ("gradient_accumulation_steps", [0]), ("steps_per_generation", [0]), ("max_steps", ["1", None]),
        ("learning_rate", ["1e-5", None, -1, float("nan")]), ("num_train_epochs", [0, None]), ("warmup_ratio", [2]),
        ("save_strategy", ["best", "sometimes"]), ("logging_steps", [0, None]), ("save_steps", [0]),
        ("bf16", ["yes"]), ("use_vllm", ["no"]), ("seed", [-1, None]), ("max_tool_calling_iterations", [-1]),
        ("beta", ["x"]), ("chat_template_kwargs", [5]), ("model_init_kwargs", [["dtype"]]),
    ],
)  # fmt: skip
def test_a_value_of_another_type_or_out_of_range_is_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"GRPOConfig\.{name}: must be "):
            GRPOConfig(**{name: value})


def test_null_where_an_argument_has_to_be_something_is_its_default() -> None:
    args = GRPOConfig(weight_decay=None, epsilon=None, use_vllm=None, epsilon_high=None)
    assert (args.weight_decay, args.epsilon, args.use_vllm, args.epsilon_high) == (0.0, 0.2, False, None)


@pytest.mark.parametrize("name", ["chat_template_kwargs", "model_init_kwargs", "lr_scheduler_kwargs"])
def test_a_mapping_of_a_command_line_is_json(name: str) -> None:
    assert SFTConfig().mapping("model_init_kwargs") == {}
    assert GRPOConfig(**{name: '{"a": 1}'}).mapping(name) == GRPOConfig(**{name: {"a": 1}}).mapping(name) == {"a": 1}
    with pytest.raises(ConfigError, match=f"{name}='a=1' is no mapping"):
        GRPOConfig(**{name: "a=1"}).mapping(name)


def test_the_correction_of_samples_can_be_switched_off() -> None:
    default = grpo_algorithm(GRPOConfig())
    assert (default.rollout_is, default.rollout_is_threshold, default.rollout_is_lower) == ("sequence", 3.0, 0.0)
    cut = grpo_algorithm(
        GRPOConfig(vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=2.0)
    )
    assert (cut.rollout_is, cut.rollout_is_threshold, cut.rollout_is_lower) == ("token", 2.0, None)
    for name, value in (("mode", "token_msk"), ("clip_min", 0.1)):
        given = {"vllm_importance_sampling_mode": "token_truncate", f"vllm_importance_sampling_{name}": value}
        with pytest.raises(ConfigError, match=f"vllm_importance_sampling_{name}(=|: must be one of)"):
            grpo_algorithm(GRPOConfig(**given))
    assert grpo_algorithm(GRPOConfig(vllm_importance_sampling_correction=False)).rollout_is is None


@pytest.mark.parametrize(
    ("algorithm", "given", "name"),
    [
        *[(grpo_algorithm, GRPOConfig(loss_type="cispo", epsilon_high=5.0, **{name: value}), name)
          for name, value in (("epsilon", 0.3), ("delta", 2.0), ("importance_sampling_level", "sequence"))],
        (grpo_algorithm, GRPOConfig(importance_sampling_level="sequence", delta=2.0), "delta"),
        (dpo_algorithm, DPOConfig(loss_type="hinge", discopop_tau=0.5), "discopop_tau"),
        (dpo_algorithm, DPOConfig(loss_type="discopop", label_smoothing=0.1), "label_smoothing"),
        (dpo_algorithm, DPOConfig(loss_type="ipo", label_smoothing=0.1), "label_smoothing"),
        (dpo_algorithm, DPOConfig(loss_type="sft", beta=0.5), "beta"),
    ],
)  # fmt: skip
def test_an_argument_that_a_loss_does_not_read_is_refused(algorithm: Any, given: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.* is not read with "):
        algorithm(given)


def test_every_argument_can_be_read_and_a_default_says_nothing() -> None:
    args = GRPOConfig()
    assert (args.vllm_server_port, args.sapo_temperature_neg, args.packing, args.dataloader_num_workers) == (
        8000,
        1.05,
        False,
        0,
    )
    assert args.pad_to_multiple_of == "auto" and args.remove_unused_columns is not None
    GRPOConfig(sapo_temperature_neg=1.05, vllm_server_port=8000, log_completions=False)
    with pytest.raises(AttributeError, match="GRPOConfig has no argument 'learning_rte'"):
        _ = args.learning_rte


def test_settings_of_the_model_that_say_nothing() -> None:
    quiet = {"revision": "main", "device_map": "auto", "quantization_config": None, "torch_dtype": None}
    assert SFTConfig(model_init_kwargs=quiet).model_settings() == {"dtype": "float32", "trust_remote_code": False}
    with pytest.raises(ConfigError, match="model_init_kwargs has 'revision'"):
        SFTConfig(model_init_kwargs={"revision": "v2"}).model_settings()
