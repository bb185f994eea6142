"""Masters, gradient sums, clipping and state of `MixedPrecisionOptimizer`."""

from __future__ import annotations

import json
import math
from itertools import starmap

import pytest
import torch
from torch import Tensor

from verl.errors import CheckpointError, ConfigError
from verl.training.optimizer import MixedPrecisionOptimizer
from verl.training.options import OptimConfig
from verl.weights.shard import Shard


def _linear(dtype: torch.dtype, seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(6, 4).to(dtype)


def _loss(model: torch.nn.Linear, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 6, generator=generator).to(model.weight.dtype)
    return (model(x).square().mean() * scale).to(model.weight.dtype)


def _optimizer(model: torch.nn.Module, **options: object) -> MixedPrecisionOptimizer:
    return MixedPrecisionOptimizer(dict(model.named_parameters()), OptimConfig(**options))


def _backward(loss: Tensor, optimizer: MixedPrecisionOptimizer) -> None:
    with optimizer.gradients.collecting():
        loss.backward()


def _steps(model: torch.nn.Linear, optimizer: MixedPrecisionOptimizer, seeds: range) -> None:
    for seed in seeds:
        _backward(_loss(model, seed), optimizer)
        optimizer.step(optimizer.gradients.norm())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_only_matrices_decay(dtype: torch.dtype) -> None:
    model = torch.nn.Linear(16, 4).to(dtype)
    with torch.no_grad():
        model.weight.fill_(1.0), model.bias.fill_(1.0)
    optimizer = _optimizer(model, lr=0.5, weight_decay=0.5, weight_decay_on="matrices")
    _backward((model(torch.zeros(1, 16, dtype=dtype)) * 0).sum(), optimizer)
    optimizer.step(0.0)
    assert model.weight.unique().tolist() == [0.75] and model.bias.unique().tolist() == [1.0]


def test_fp64_steps_equal_torch_adamw_with_clipping() -> None:
    ours, theirs = _linear(torch.float64), _linear(torch.float64)
    options = {"lr": 1e-2, "betas": (0.8, 0.9), "adam_eps": 1e-7, "weight_decay": 0.1, "max_grad_norm": 0.05}
    optimizer = _optimizer(ours, **options)
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.1)
    for seed in range(4):
        for part in range(3):
            _backward(_loss(ours, 10 * seed + part), optimizer)
            _loss(theirs, 10 * seed + part).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        assert optimizer.gradients.norm() == pytest.approx(float(norm), rel=1e-12)
        optimizer.step(optimizer.gradients.norm())
        adamw.step()
        adamw.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_bf16_updates_below_its_resolution_accumulate() -> None:
    model = _linear(torch.bfloat16)
    torch.nn.init.constant_(model.weight, 1.0)
    optimizer = _optimizer(model, lr=1e-4, max_grad_norm=None, moments="float32")
    naive = torch.nn.Parameter(model.weight.detach().clone())
    plain = torch.optim.AdamW([naive], lr=1e-4, weight_decay=0.0)
    for _ in range(60):  # Adam moves each element by about lr: 60 * 1e-4 is more than bf16's step of 2^-8 below 1
        _backward(model.weight.sum(), optimizer)
        optimizer.step(optimizer.gradients.norm())
        naive.grad = torch.ones_like(naive)
        plain.step()
    assert torch.equal(naive, torch.ones_like(naive))
    assert torch.allclose(model.weight.float(), torch.tensor(1 - 60e-4), atol=2**-9)
    assert model.weight.dtype == torch.bfloat16
    master = dict(optimizer.tensors())["weight.master"]
    assert master.dtype == torch.float32
    torch.testing.assert_close(master, torch.full_like(master, 1 - 60e-4), atol=5e-6, rtol=0)


def test_bf16_gradients_add_up_in_fp32_and_are_freed() -> None:
    model = _linear(torch.bfloat16)
    optimizer = _optimizer(model)
    total = 0.0
    for scale in (1.0, 2**-9, 2**-9):  # bf16 would lose the small ones: 1 + 2^-9 rounds to 1
        _backward(model.bias.sum() * scale, optimizer)
        total += scale
        assert model.bias.grad is None
    assert optimizer.gradients.norm() == pytest.approx(total * math.sqrt(4), rel=1e-7)


def test_gradient_buffers_are_allocated_once() -> None:
    model = _linear(torch.bfloat16)
    optimizer = _optimizer(model)
    _steps(model, optimizer, range(1))
    before = [weight.gradient.data_ptr() for weight in optimizer.gradients.weights if weight.gradient is not None]
    _steps(model, optimizer, range(1, 4))
    after = [weight.gradient.data_ptr() for weight in optimizer.gradients.weights if weight.gradient is not None]
    assert before == after
    assert len(before) == 2


def test_the_norm_of_a_large_gradient_is_exact() -> None:
    weight = torch.nn.Parameter(torch.zeros(20000, 500))
    optimizer = MixedPrecisionOptimizer({"w": weight}, OptimConfig())
    gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    _backward((weight * gradient).sum(), optimizer)
    exact = float(gradient.double().norm())
    assert optimizer.gradients.norm() == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_shows_in_the_norm_and_clear_forgets_it(bad: float) -> None:
    model = _linear(torch.bfloat16)
    optimizer = _optimizer(model)
    _steps(model, optimizer, range(2))
    _backward(model.weight[0, 0] * bad, optimizer)
    assert not math.isfinite(optimizer.gradients.norm())
    optimizer.gradients.clear()
    assert optimizer.gradients.norm() == 0.0
    _steps(model, optimizer, range(1))
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_weight_without_gradient_keeps_still() -> None:
    model = _linear(torch.float32)
    optimizer = _optimizer(model, lr=0.1, weight_decay=0.5)
    _steps(model, optimizer, range(2))  # an old gradient of the bias must not act again
    bias = model.bias.detach().clone()
    _backward(model.weight.sum(), optimizer)
    optimizer.step(optimizer.gradients.norm())
    assert torch.equal(model.bias, bias)


def test_frozen_weights_are_not_trained_and_all_frozen_is_refused() -> None:
    model = _linear(torch.float32)
    model.bias.requires_grad_(False)
    optimizer = _optimizer(model)
    _steps(model, optimizer, range(1))
    assert not any(name.startswith("bias") for name in dict(optimizer.tensors()))
    model.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        _optimizer(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_round_trip_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    model = _linear(dtype)
    optimizer = _optimizer(model, lr=1e-2, schedule="cosine", warmup_steps=2, total_steps=9)
    _steps(model, optimizer, range(4))
    tensors, meta = dict(optimizer.tensors()), optimizer.meta()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    meta = json.loads(json.dumps(meta))
    other = _linear(dtype, seed=1)
    with torch.no_grad():
        for a, b in zip(other.parameters(), model.parameters(), strict=True):
            a.copy_(b)
    resumed = _optimizer(other, lr=1e-2, schedule="cosine", warmup_steps=2, total_steps=9)
    resumed.load_state(starmap(Shard.whole, tensors.items()), meta)
    assert resumed.lr == optimizer.lr
    _steps(model, optimizer, range(4, 7))
    _steps(other, resumed, range(4, 7))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    for name, tensor in dict(optimizer.tensors()).items():
        assert torch.equal(tensor, dict(resumed.tensors())[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_become_the_weights_of_a_model_in_fp32(dtype: torch.dtype) -> None:
    half, full = _linear(dtype), _linear(torch.float32, seed=1)
    first, second = _optimizer(half, lr=1e-2), _optimizer(full, lr=1e-2)
    _steps(half, first, range(2))
    tensors, meta = dict(first.tensors()), first.meta()
    second.load_state(starmap(Shard.whole, tensors.items()), meta)
    assert all(torch.equal(weight, tensors[f"{name}.master"]) for name, weight in full.named_parameters())
    _steps(full, second, range(2))
    # Kept beside the weights that are trained now, they would be saved again and win over them at the next load.
    assert [name for name in dict(second.tensors()) if name.endswith(".master")] == []


def test_state_of_another_model_is_refused() -> None:
    model = _linear(torch.bfloat16)
    optimizer = _optimizer(model)
    _steps(model, optimizer, range(1))
    tensors, meta = dict(optimizer.tensors()), optimizer.meta()
    with pytest.raises(CheckpointError, match=r"other\.exp_avg"):
        optimizer.load_state([Shard.whole("other.exp_avg", torch.zeros(2))], meta)
    with pytest.raises(CheckpointError, match="shape"):
        optimizer.load_state([Shard.whole("weight.exp_avg", torch.zeros(2, 2))], meta)
    with pytest.raises(CheckpointError, match=r"lacks 'weight\.master'"):
        optimizer.load_state([Shard.whole(k, v) for k, v in tensors.items() if k != "weight.master"], meta)


def test_loaded_state_does_not_alias_what_was_given() -> None:
    model = _linear(torch.bfloat16)
    optimizer = _optimizer(model)
    _steps(model, optimizer, range(2))
    tensors, meta = dict(optimizer.tensors()), optimizer.meta()
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    other = _linear(torch.bfloat16)
    resumed = _optimizer(other)
    resumed.load_state(starmap(Shard.whole, tensors.items()), meta)
    _steps(other, resumed, range(2))
    assert all(torch.equal(tensors[name], kept[name]) for name in kept)


def test_offload_frees_the_sums_and_changes_no_number() -> None:
    model, twin = _linear(torch.bfloat16), _linear(torch.bfloat16)
    optimizer, plain = _optimizer(model, lr=1e-2), _optimizer(twin, lr=1e-2)
    _steps(model, optimizer, range(2))
    _steps(twin, plain, range(2))
    optimizer.move(to_host=True)
    optimizer.gradients.free()
    assert all(weight.gradient is None for weight in optimizer.gradients.weights)
    optimizer.move(to_host=False)
    _steps(model, optimizer, range(2, 4))
    _steps(twin, plain, range(2, 4))
    assert torch.equal(model.weight, twin.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_callers_own_optimizer_steps_on_the_masters(dtype: torch.dtype) -> None:
    model, twin = _linear(dtype), _linear(torch.float64)
    with torch.no_grad():
        for a, b in zip(twin.parameters(), model.parameters(), strict=True):
            a.copy_(b)
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    optimizer = MixedPrecisionOptimizer(dict(model.named_parameters()), OptimConfig(max_grad_norm=None), optimizer=own)
    assert optimizer.lr == 0.1
    for seed in range(3):
        _backward(_loss(model, seed), optimizer)
        _loss(twin, seed).backward()
        optimizer.step(optimizer.gradients.norm())
        reference.step()
        reference.zero_grad()
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.double(), b, atol=tolerance, rtol=tolerance)
    tensors, meta = dict(optimizer.tensors()), optimizer.meta()
    assert "weight.momentum_buffer" in tensors
    assert meta["groups"][0]["momentum"] == 0.9
    again = MixedPrecisionOptimizer(
        dict(model.named_parameters()),
        OptimConfig(max_grad_norm=None),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5),
    )
    again.load_state(starmap(Shard.whole, tensors.items()), json.loads(json.dumps(meta)))
    assert again.lr == 0.1
    assert torch.equal(dict(again.tensors())["weight.momentum_buffer"], tensors["weight.momentum_buffer"])


def test_an_optimizer_that_has_stepped_keeps_what_it_knows() -> None:
    model, twin = _linear(torch.float32), _linear(torch.float32)
    own, reference = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, twin))
    for m, o in ((model, own), (twin, reference)):
        _loss(m, 0).backward()
        o.step()
        o.zero_grad()
    optimizer = MixedPrecisionOptimizer(dict(model.named_parameters()), OptimConfig(max_grad_norm=None), own)
    _steps(model, optimizer, range(1, 3))
    for seed in range(1, 3):
        reference.zero_grad()
        _loss(twin, seed).backward()
        reference.step()
    torch.testing.assert_close(model.weight, twin.weight)


def test_an_optimizer_of_another_model_is_refused() -> None:
    foreign = torch.optim.SGD(_linear(torch.float32).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="no parameters of this model"):
        MixedPrecisionOptimizer(dict(_linear(torch.float32).named_parameters()), OptimConfig(), foreign)


def test_weights_the_callers_optimizer_does_not_hold_stay() -> None:
    model = _linear(torch.float32)
    own = torch.optim.SGD([model.weight], lr=0.1)
    optimizer = MixedPrecisionOptimizer(dict(model.named_parameters()), OptimConfig(), own)
    bias, weight = model.bias.detach().clone(), model.weight.detach().clone()
    _steps(model, optimizer, range(1))
    assert torch.equal(model.bias, bias)
    assert model.bias.grad is None
    assert not torch.equal(model.weight, weight)


def test_a_tied_weight_is_one_weight() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    optimizer = _optimizer(model, lr=0.1)
    _backward(model.head(model.embed(torch.tensor([1, 2]))).logsumexp(-1).sum(), optimizer)
    assert len(optimizer.gradients.weights) == 1
    optimizer.step(optimizer.gradients.norm())
    assert {name.split(".")[0] for name in dict(optimizer.tensors())} == {"embed"}


def test_integer_weights_are_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float8_e4m3fn))
    with pytest.raises(ConfigError, match="float8"):
        MixedPrecisionOptimizer({"w": weight}, OptimConfig())


def test_fp16_gradients_survive_through_the_loss_scale() -> None:
    model = _linear(torch.float16)
    optimizer = _optimizer(model, max_grad_norm=None)
    assert optimizer.gradients.loss_scale == 4096.0
    small = 2.0**-26  # less than half of the least fp16 number
    for _ in range(2):
        _backward(model.bias.sum().float() * small * optimizer.gradients.loss_scale, optimizer)
    assert optimizer.gradients.norm() == pytest.approx(2 * small * 2, rel=1e-3)


def test_the_loss_scale_halves_at_overflow_and_recovers() -> None:
    model = _linear(torch.float16)
    optimizer = _optimizer(model, lr=0.0)
    _backward(model.bias.sum().float() * 100 * optimizer.gradients.loss_scale, optimizer)
    assert math.isinf(optimizer.gradients.norm())
    optimizer.gradients.rejected()
    assert optimizer.gradients.loss_scale == 2048.0
    tensors, meta = dict(optimizer.tensors()), optimizer.meta()
    resumed = _optimizer(_linear(torch.float16), lr=0.0)
    resumed.load_state(starmap(Shard.whole, tensors.items()), json.loads(json.dumps(meta)))
    assert resumed.gradients.loss_scale == 2048.0
    for _ in range(500):
        _backward(model.bias.sum().float() * optimizer.gradients.loss_scale, optimizer)
        optimizer.step(optimizer.gradients.norm())
    assert optimizer.gradients.loss_scale == 4096.0
    assert _optimizer(_linear(torch.bfloat16)).gradients.loss_scale == 1.0
