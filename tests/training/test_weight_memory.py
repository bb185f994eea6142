"""Who owns weight memory where one rank trains and generates: generation does, and training pieces are views of it."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.training.cases import (
    OPTIM,
    ROWS,
    gradients,
    log_probs,
    make_engine,
    ragged_batch,
    state_of,
    tiny_model,
    update,
)
from verl.training.optimizer import MixedPrecisionOptimizer
from verl.training.torch_engine import TorchEngine

RANKS = 2
FP32_MOMENTS = OPTIM.model_copy(update={"moments": "float32"})


class Rank:
    """One of two ranks: whole bf16 weights that generate, an optimizer over the rows that this rank trains."""

    def __init__(self, rank: int) -> None:
        self.engine = make_engine(tiny_model("llama", torch.bfloat16), optim=FP32_MOMENTS)
        self.buffers = {name: weight.data for name, weight in self.engine.model.named_parameters()}
        pieces = {name: torch.nn.Parameter(buffer.chunk(RANKS)[rank]) for name, buffer in self.buffers.items()}
        weights = dict(self.engine.model.named_parameters())
        self.rank, self.optimizer = rank, MixedPrecisionOptimizer(weights, FP32_MOMENTS, pieces=pieces)

    def step(self, sums: dict[str, Tensor], norm: float) -> None:
        for weight in self.optimizer.gradients.weights:
            weight.gradient, weight.has_gradient = sums[weight.name].chunk(RANKS)[self.rank].clone(), True
        self.optimizer.step(norm)


def all_gather(ranks: list[Rank]) -> None:
    """Every rank's rows into every rank's buffers, in place."""
    for name, buffer in ranks[0].buffers.items():
        for number in range(RANKS):
            rows = ranks[number].buffers[name].chunk(RANKS)[number].clone()
            for rank in ranks:
                rank.buffers[name].chunk(RANKS)[number].copy_(rows)
        assert torch.equal(buffer, ranks[1].buffers[name])


def test_optimizer_steps_on_views_of_generation_buffers_are_those_of_the_whole_model() -> None:
    whole = make_engine(tiny_model("llama", torch.bfloat16), optim=FP32_MOMENTS)
    ranks = [Rank(0), Rank(1)]
    before = {name: buffer.data_ptr() for name, buffer in ranks[0].buffers.items()}
    for seed in range(3):
        batch = ragged_batch(ROWS, seed)
        sums = gradients(whole, batch)
        norm = update(whole, batch)["grad_norm"]
        for rank in ranks:
            rank.step(sums, norm)
        all_gather(ranks)
        for rank in ranks:  # what generates reads the new weights without being given them
            assert torch.equal(log_probs(rank.engine, batch), log_probs(whole, batch))
    assert {name: buffer.data_ptr() for name, buffer in ranks[0].buffers.items()} == before
    assert masters(whole, ranks) == 0


def masters(whole: TorchEngine, ranks: list[Rank]) -> float:
    """How far the pieces' fp32 masters, put together, are from the whole model's."""
    states = [dict(rank.optimizer.tensors()) for rank in ranks]
    expected = {name: tensor for name, tensor in state_of(whole).items() if name.endswith(".master")}
    return max(
        float((torch.cat([state[name] for state in states]) - tensor).abs().max()) for name, tensor in expected.items()
    )
