"""`use_torch_compile`: the numbers stay the same, and lengths do not compile again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.training.cases import make_engine, ragged_batch, tiny_model, update
from verl.errors import ConfigError
from verl.models.lora import add_lora
from verl.models.options import LoraOptions
from verl.training.options import TrainOptions, layout_of

ROWS = [(0, 3), (0, 5), (2, 4), (3, 1)]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def trained(kind: str, lora: bool = False, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """Log-probs before, and weights after a step of plain SGD: the gradients."""
    model = tiny_model(kind)
    if lora:
        torch.manual_seed(1)
        add_lora(model, LoraOptions(r=2))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    engine = make_engine(model, optimizer=torch.optim.SGD(weights, lr=1.0), **options)
    batch = ragged_batch(ROWS)
    before = engine.predict(batch, ["log_probs"])["log_probs"]
    update(engine, batch)
    return [before, *(weight.detach() for weight in weights)], engine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("llama", {"gradient_checkpointing": True}),
        ("llama", {"lora": True}),
    ],
    ids=["llama", "qwen3", "checkpointing", "lora"],
)
def test_log_probs_and_gradients_are_those_of_the_model(kind: str, options: dict[str, Any]) -> None:
    want, _ = trained(kind, **options)
    found, engine = trained(kind, **options, use_torch_compile=True)
    assert engine.forward.packed.fused is None
    for a, b in zip(found, want, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0
    for longest in (6, 9, 17, 30):  # of all layers, with gradients
        update(engine, ragged_batch([(0, longest), (1, longest - 1)]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= graphs + 3


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: None)
    with pytest.raises(ConfigError, match=r"use_torch_compile: torch\.compile needs a C\+\+ compiler of the host"):
        make_engine(tiny_model("llama"), use_torch_compile=True)


def test_padded_rows_and_cut_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="for packed rows"):
        make_engine(tiny_model("llama"), use_torch_compile=True, remove_padding=False)
    for options, name in (({"strategy": "fsdp"}, "strategy 'fsdp'"), ({"tensor_parallel_size": 2}, "tensor_parallel")):
        with pytest.raises(ConfigError, match=f"not with {name}"):
            layout_of(TrainOptions(use_torch_compile=True, **options), 2)
