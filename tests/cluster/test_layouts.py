"""Generation in another layout than training: samples, losses and weights are those of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import ranks
from tests.cluster.test_torchrun import SCRIPT, assert_equal_runs

FSDP, TENSOR = {"strategy": "fsdp"}, {"tensor_parallel_size": 4}
PAIRS = {"tensor_parallel_size": 2}
#: Settings of training on 4 ranks, and of generation.
LAYOUTS = {
    "fsdp to tensor": (FSDP, {"tensor_parallel_size": 2}),
    "tensor to tensor, overlapped": (TENSOR, {"tensor_parallel_size": 2, "overlap_comm": True}),
    "fsdp to whole, overlapped": (FSDP, {"overlap_comm": True}),
    "pipeline and tensor to tensor": ({**PAIRS, "pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}),
    "tensor and data to whole": (PAIRS, {}),
    "data to tensor": ({}, {"tensor_parallel_size": 4}),
    "fsdp to whole, another engine": (FSDP, {"rollout": "hf"}),
    "fsdp to tensor, apart": (FSDP, {"tensor_parallel_size": 2}),
}
APART = {"actor": "cpu:0-1", "rollout": "cpu:2-3"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "names"),
    [(2, [*LAYOUTS][:1]), (4, [*LAYOUTS])],
    ids=["one", "all"],
)
def test_generation_in_another_layout_equals_one_process(
    make_tiny: Callable[..., Path], tmp_path: Path, size: int, names: list[str]
) -> None:
    model = make_tiny("gpt2", torch.float64)
    ranks.alone(SCRIPT, model, tmp_path / "alone")
    cases = {name: (*LAYOUTS[name], APART if "apart" in name else None) for name in names}
    ranks.job(size, SCRIPT.with_name("layouts.py"), model, tmp_path, json.dumps(cases))
    for name in names:
        assert_equal_runs(tmp_path / "alone", tmp_path / name)


def test_a_verb_is_refused_while_ranks_that_generate_together_are_in_a_stream(make_tiny: Callable[..., Path]) -> None:
    done = ranks.job(2, SCRIPT.with_name("rank_open_stream.py"), make_tiny("gpt2", torch.float64))
    (found,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    names = ["'actor.log_probs'", "'critic.", "'actor.generate'"]
    for name, message in zip(names, found["refused"], strict=True):
        assert message.startswith(name) and "stream of 'actor.generate' is open" in message and "close()" in message
    assert found["rows"] == found["log_probs after it"] == found["log_probs after close"] == 3
