"""The learning-rate schedule and the limits of `OptimConfig`."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from verl.errors import ConfigError
from verl.training.optimizer import lr_factor
from verl.training.options import OptimConfig, TrainOptions, layout_of
from verl.weights.layout import Layout


def test_a_schedule_may_be_a_function_of_all_steps() -> None:
    assert _factors(3, schedule=lambda step: step / 4) == [0, 0.25, 0.5]
    with pytest.raises(ConfigError, match="schedule: is a function of all steps: leave warmup_steps"):
        OptimConfig(schedule=lambda step: 1.0, warmup_steps=2)


def _factors(steps: int, **options: object) -> list[float]:
    config = OptimConfig(**options)
    return [lr_factor(config, step) for step in range(steps)]


def test_constant_is_one_from_the_first_step() -> None:
    assert _factors(3) == [1.0, 1.0, 1.0]


def test_warm_up_rises_to_one_and_does_not_waste_the_first_step() -> None:
    assert _factors(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_zero_at_total_steps_and_stays_there() -> None:
    factors = _factors(8, warmup_steps=2, schedule="linear", total_steps=6)
    assert factors == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


def test_cosine_passes_the_middle_at_one_half() -> None:
    factors = _factors(10, warmup_steps=1, schedule="cosine", total_steps=9)
    assert factors[:2] == [1.0, 1.0]
    assert factors[5] == pytest.approx(0.5)
    assert factors[3] == pytest.approx(0.853553, abs=1e-6)
    assert factors[9] == pytest.approx(0.0)


def test_a_warm_up_by_share_needs_a_run() -> None:
    with pytest.raises(ConfigError, match=r"of a run's steps, .* set optim.warmup_steps"):
        _factors(1, warmup_ratio=0.1)
    with pytest.raises(ConfigError, match="warmup_ratio: is in the place of warmup_steps"):
        OptimConfig(warmup_ratio=0.1, warmup_steps=2)


def test_a_decay_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="total_steps"):
        lr_factor(OptimConfig(schedule="cosine"), 0)


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 1e-5},
        {"lr": -1e-5},
        {"lr": True},
        {"lr": "1e-5"},
        {"warmup_steps": 1.0},
        {"lr": float("nan")},
        {"betas": (0.9, 1.0)},
        {"adam_eps": 0.0},
        {"max_grad_norm": 0.0},
        {"schedule": "polynomial"},
        {"schedule": "linear", "warmup_steps": 10, "total_steps": 10},
    ],
)
def test_nonsense_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        OptimConfig(**options)


def test_options_import_without_torch() -> None:
    code = "import sys, verl.training.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("options", "size", "parallel", "layout"),
    [
        ({}, 4, "data", Layout(replicate=4)),
        ({"strategy": "single"}, 1, "data", Layout()),
        ({"strategy": "fsdp"}, 4, "data", Layout(shard=4)),
        ({"strategy": "deepspeed"}, 2, "data", Layout(replicate=2)),
        ({"strategy": "deepspeed", "deepspeed_config": {"zero_stage": 3}}, 2, "data", Layout(shard=2)),
        ({"strategy": "fsdp", "fsdp_config": {"fsdp_size": 2}}, 4, "data", Layout(replicate=2, shard=2)),
        ({}, 2, "tensor", Layout(tp=2)),
        ({"pipeline_parallel_size": 2}, 4, "tensor", Layout(pp=2, tp=2)),
        ({"tensor_parallel_size": 2}, 4, "tensor", Layout(replicate=2, tp=2)),
        ({"strategy": "fsdp", "ulysses_sequence_parallel_size": 2}, 4, "data", Layout(shard=2, sp=2)),
        ({"strategy": "megatron", "tensor_parallel_size": 2}, 4, "data", Layout(replicate=2, tp=2)),
        ({"expert_parallel_size": 2}, 4, "data", Layout(replicate=2, ep=2)),
    ],
)
def test_settings_and_the_map_give_a_layout(options: dict[str, Any], size: int, parallel: str, layout: Layout) -> None:
    assert layout_of(TrainOptions.of(options, "train"), size, parallel) == layout


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({"tensor_parallel_size": 3}, 4, "tensor_parallel_size=3 does not divide the 4 ranks"),
        ({"tensor_parallel_size": 2}, 1, "tensor_parallel_size=2 does not divide the 1 rank that"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 4}, 4, "pipeline_parallel_size=4 x tensor_parallel_si"),
        ({"strategy": "fsdp", "fsdp_config": {"fsdp_size": 3}}, 4, "fsdp_size=3 does not divide the 4 data-parallel"),
        ({"fsdp_config": {"fsdp_size": 2}}, 4, "fsdp_config is for strategy 'fsdp', and this is strategy 'ddp'"),
        (
            {"deepspeed_config": {"zero_stage": 3}},
            2,
            "deepspeed_config is for strategy 'deepspeed', and this is strategy 'ddp'",
        ),
        ({"strategy": "deepspeed", "tensor_parallel_size": 2}, 4, "'deepspeed' .* not with tensor_parallel_size"),
        ({"strategy": "megatron", "expert_parallel_size": 2}, 4, "'megatron' cuts by .*, not by expert_parallel_size"),
        (
            {"strategy": "fsdp", "fsdp_config": {"param_offload": True}},
            1,
            "are of gathered weights, and here is one data-parallel",
        ),
        ({"strategy": "single"}, 2, "strategy 'single' trains on one rank, and there are 2"),
    ],
)
def test_a_layout_that_ranks_cannot_have_is_refused(options: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout_of(TrainOptions.of(options, "train"), size)
