"""A model that the script made is trained on ranks that have parts of it; what is read and exported is that model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import ranks

SCRIPT = Path(__file__).with_name("rank_live.py")
WAYS: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp"},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "replicas": {},
    "ulysses": {"ulysses_sequence_parallel_size": 2},
    "fsdp with adapters": {"strategy": "fsdp", "lora": True},
    "tensor with adapters": {"tensor_parallel_size": 2, "lora": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ways"),
    [("llama", ["fsdp", "pipeline"]), ("qwen2", [*WAYS]), ("gpt2", [*WAYS])],
)
def test_a_live_model_that_ranks_have_cut_is_read_and_exported_whole(
    make_tiny: Callable[..., Path], tmp_path: Path, kind: str, ways: list[str]
) -> None:
    model = make_tiny(kind, torch.float64)
    chosen = {name: WAYS[name] for name in ways}
    alone = {name: {"lora": True} if "lora" in train else {} for name, train in chosen.items()}
    ranks.alone(SCRIPT, model, tmp_path / "alone", json.dumps(alone))
    ranks.job(2, SCRIPT, model, tmp_path / "ranks", json.dumps(chosen))
    for name in ways:
        one, many = tmp_path / "alone" / name, tmp_path / "ranks" / name
        for file in ("read", "merged"):
            expected, found = torch.load(one / file), torch.load(many / file)
            assert expected.keys() == found.keys(), (name, file)
            for weight in expected:
                torch.testing.assert_close(found[weight], expected[weight], rtol=0, atol=1e-7, msg=f"{name} {weight}")
        reopened = AutoModelForCausalLM.from_pretrained(many / "export", dtype=torch.float64)
        tokens = torch.tensor([[5, 6, 7]])
        torch.testing.assert_close(reopened(tokens).logits, torch.load(many / "logits"), rtol=0, atol=1e-9, msg=name)
