"""Gradient checkpointing: nothing random comes with it, and less is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.training.cases import (
    OPTIM,
    ROWS,
    assert_same,
    gradients,
    log_probs,
    make_engine,
    ragged_batch,
    tiny_model,
    update,
)
from verl.batch import Batch
from verl.training.torch_engine import TorchEngine


def test_checkpointing_switches_dropout_off_for_good() -> None:
    model = tiny_model("gpt2")
    assert any(m.p > 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))
    engine = make_engine(model, optim=OPTIM, gradient_checkpointing=True)
    assert all(m.p == 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))
    batch = ragged_batch(ROWS)
    engine.optimizer.config = OPTIM.model_copy(update={"lr": 0.0, "weight_decay": 0.0})
    assert update(engine, batch) == update(engine, batch)


@pytest.mark.parametrize("kind", ["falcon", "phimoe"])
def test_checkpointing_brings_no_noise_and_leaves_what_is_none(kind: str) -> None:
    batch, outputs = ragged_batch(ROWS), []
    for checkpointing in (False, True):
        engine = make_engine(tiny_model(kind, torch.float32), optim=OPTIM, gradient_checkpointing=checkpointing)
        outputs.append((log_probs(engine, batch), gradients(engine, batch)))
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert outputs[0][1].keys() == outputs[1][1].keys()
    assert_same(outputs[0][1], outputs[1][1], 1e-4)


def saved_bytes(engine: TorchEngine, batch: Batch) -> int:
    """Most bytes of tensors kept at once for the backward pass (each storage once, weights left out)."""
    weights = {p.untyped_storage().data_ptr() for p in engine.model.parameters()}
    live: dict[int, list[int]] = {}
    peak = 0

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal peak
            self.tensor = tensor
            storage = tensor.untyped_storage()
            self.key = storage.data_ptr()
            if self.key not in weights:
                live.setdefault(self.key, [0, storage.nbytes()])[0] += 1
                peak = max(peak, sum(size for _, size in live.values()))

        def __del__(self) -> None:
            if self.key in live:
                live[self.key][0] -= 1
                if live[self.key][0] == 0:
                    del live[self.key]

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        update(engine, batch)
    return peak


@pytest.mark.quick("llama")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_checkpointing_keeps_at_least_30_percent_fewer_activations(kind: str) -> None:
    batch = ragged_batch([(7, 60)] * 6)

    def kept(layers: int, checkpointing: bool) -> int:
        model = tiny_model(kind, layers=layers)
        return saved_bytes(make_engine(model, optim=OPTIM, gradient_checkpointing=checkpointing), batch)

    # The hooks do not see what the backward pass computes again: the activations of one layer at a time.
    one_layer = kept(6, False) - kept(5, False)
    assert one_layer > 0
    assert kept(6, True) + one_layer <= 0.7 * kept(6, False)
