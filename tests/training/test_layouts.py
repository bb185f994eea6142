"""A model over the ranks of a layout learns what one process learns, and goes on in any other layout."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import BloomConfig, BloomForCausalLM

from tests.ranks import job
from tests.training.cases import tiny_model
from tests.training.rank_layouts import CASES
from verl.errors import ConfigError
from verl.training.options import EngineOptions
from verl.training.torch_engine import TorchEngine
from verl.weights.layout import Layout, Mesh

SCRIPT = Path(__file__).with_name("rank_layouts.py")


def bloom() -> Any:
    """Its attention has a bias of its own, ALiBi."""
    return BloomForCausalLM(BloomConfig(vocab_size=37, hidden_size=32, n_layer=2, n_head=4))


@pytest.mark.parametrize(
    ("cases", "tolerance"),
    [
        pytest.param(
            cases, 1e-5 if cases.startswith("fp32") else 1e-9, marks=() if cases == "fast" else pytest.mark.slow
        )
        for cases in CASES
    ],
)
def test_a_layout_equals_one_process_and_its_state_goes_on_in_another(cases: str, tolerance: float) -> None:
    done = job(4, SCRIPT, cases)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found
    for case in found:
        exact = ("weights", "predicted", "resumed") if tolerance < 1e-6 else ()
        for name in ("metrics", *exact):
            assert case[name] < tolerance, (name, case)
        assert case["gradient"] > 0.01, case
        assert case["names"], case
        assert case["cuts"] == [dim for dim in case["sizes"] if dim in ("shard", "ep", "tp")], case
        # Pieces, not whole weights; a tied embedding is on two stages.
        pieces = math.prod(size for dim, size in case["sizes"].items() if dim not in ("replicate", "sp", "ep"))
        assert case["held"] < 1.4 / pieces, case


@pytest.mark.parametrize(
    ("layout", "model", "words"),
    [
        (Layout(ep=2), tiny_model, "ep=2 does not divide the model's 0 experts"),
        (Layout(ep=3), lambda: tiny_model("mixtral"), "ep=3 does not divide the model's 4 experts"),
        (Layout(sp=3), tiny_model, "sp=3 does not divide the model's 4 attention heads"),
        (Layout(sp=2), bloom, "sp=2 cuts packed sequences at the attention, and BloomForCausalLM cannot be called so"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused_by_name(layout: Layout, model: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TorchEngine(model(), EngineOptions(), mesh=Mesh(tuple(range(layout.size)), layout))


def test_padded_rows_are_not_cut_by_sequence() -> None:
    with pytest.raises(ConfigError, match="and use_remove_padding is false"):
        TorchEngine(tiny_model(), EngineOptions(remove_padding=False), mesh=Mesh((0, 1), Layout(sp=2)))
