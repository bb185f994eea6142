"""token_log_probs against log_softmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.test_device import Fake
from verl._host import device
from verl.models import log_probs, memory
from verl.models.log_probs import token_log_probs
from verl.models.memory import HeadSizes

N, D, V = 13, 7, 29


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    hidden = torch.randn(N, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, requires_grad=True)
    bias = torch.randn(V, dtype=dtype, requires_grad=True)
    return hidden, weight, bias, torch.randint(V, (N,))


def reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("chunk", [1, 5, None])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.5, None), (2.0, 3.0)])
@pytest.mark.parametrize("entropy", [True, False])
def test_values_and_gradients(
    temperature: float,
    chunk: int | None,
    scale: float,
    cap: float | None,
    entropy: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, weight, bias, targets = inputs()
    if chunk is not None:  # tokens at a time
        monkeypatch.setattr(memory, "CPU", memory.CPU._replace(chunk=chunk * len(weight)))
    expected = reference(hidden, weight, bias, targets, temperature, scale, cap)
    options = {"temperature": temperature, "entropy": entropy, "scale": scale, "softcap": cap}
    log_probs, entropies = token_log_probs(hidden, weight, targets, bias=bias, **options)
    a, b = torch.randn(2, N, dtype=torch.float64)
    assert torch.allclose(log_probs, expected[0], rtol=0, atol=1e-12)
    loss, expected_loss = (log_probs * a).sum(), (expected[0] * a).sum()
    assert (entropies is None) == (not entropy)
    if entropies is not None:
        assert torch.allclose(entropies, expected[1], rtol=0, atol=1e-12)
        loss, expected_loss = loss + (entropies * b).sum(), expected_loss + (expected[1] * b).sum()
    leaves = [hidden, weight, bias]
    for found, wanted in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(expected_loss, leaves), strict=True
    ):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("scale", "cap"), [(0.5, None), (2.0, 3.0)])
def test_statistics_are_beside_the_log_probs_and_move_none(
    dtype: torch.dtype, scale: float, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, bias, targets = inputs(dtype)
    monkeypatch.setattr(memory, "CPU", memory.CPU._replace(chunk=5 * len(weight)))
    options = {"bias": bias, "scale": scale, "softcap": cap, "temperature": 0.7}
    with torch.no_grad():
        logits = torch.nn.functional.linear(hidden, weight, bias).to(torch.promote_types(dtype, torch.float32)) * scale
        logits = (logits if cap is None else cap * torch.tanh(logits / cap)) / 0.7
    targets[::2] = logits.argmax(1)[::2]
    statistics = logits.new_zeros(3, N)
    plain, _ = token_log_probs(hidden, weight, targets, **options)
    log_probs, entropies = token_log_probs(hidden, weight, targets, **options, statistics=statistics)
    assert torch.equal(log_probs, plain) and entropies is None and not statistics.requires_grad
    leaves = [hidden, weight, bias]
    for one, other in zip(*(torch.autograd.grad(x.sum(), leaves) for x in (log_probs, plain)), strict=True):
        assert torch.equal(one, other)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    chosen = logits.gather(1, targets[:, None])[:, 0]
    expected = torch.stack([entropy, logits.mean(-1), (chosen >= logits.amax(-1)).to(logits.dtype)])
    assert torch.allclose(statistics, expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)
    assert 0.5 < float(statistics[2].mean()) < 1


def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias, targets = inputs()
    monkeypatch.setattr(memory, "CPU", memory.CPU._replace(chunk=4 * len(weight)))

    def both(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor | None]:
        return token_log_probs(hidden, weight, targets, bias=bias, temperature=0.7, entropy=True, softcap=4.0)

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


def test_only_one_result_used() -> None:
    hidden, weight, _, targets = inputs()
    _, entropies = token_log_probs(hidden, weight, targets, entropy=True)
    _, expected = reference(hidden, weight, None, targets, 1.0, 1.0, None)
    (found,) = torch.autograd.grad(entropies.sum(), hidden)
    assert torch.allclose(found, torch.autograd.grad(expected.sum(), hidden)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_head_or_frozen_body(frozen: int) -> None:
    hidden, weight, _, targets = inputs()
    leaves = [hidden, weight]
    leaves[frozen].requires_grad_(False)
    token_log_probs(hidden, weight, targets)[0].sum().backward()
    assert leaves[frozen].grad is None
    assert leaves[1 - frozen].grad is not None


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.full((2, 4), 1e4, requires_grad=True)
    weight = torch.cat([torch.ones(1, 4), -torch.ones(8, 4)])
    log_probs, entropies = token_log_probs(hidden, weight, torch.tensor([0, 3]), entropy=True)
    assert log_probs.tolist() == [0.0, -80000.0]
    assert entropies.tolist() == [0.0, 0.0]
    (log_probs + entropies).sum().backward()
    assert hidden.grad.isfinite().all()


def test_bf16_gives_fp32_results_and_bf16_gradients() -> None:
    hidden, weight, _, targets = inputs(torch.bfloat16)
    log_probs, entropies = token_log_probs(hidden, weight, targets, temperature=0.8, entropy=True)
    assert log_probs.dtype == entropies.dtype == torch.float32
    expected = reference(hidden.double(), weight.double(), None, targets, 0.8, 1.0, None)
    assert (log_probs - expected[0]).abs().max() < 0.1
    (log_probs.sum() + entropies.sum()).backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    found, wanted = weight.grad.double(), torch.autograd.grad(sum(e.sum() for e in expected), weight)[0].double()
    assert (found - wanted).norm() < 0.02 * wanted.norm()


def test_no_tokens() -> None:
    hidden, weight, _, targets = inputs()
    log_probs, entropies = token_log_probs(hidden[:0], weight, targets[:0], entropy=True)
    assert log_probs.shape == entropies.shape == (0,)
    log_probs.sum().backward()
    assert weight.grad.abs().sum() == 0


def test_temperature_zero_is_refused() -> None:
    hidden, weight, _, targets = inputs()
    with pytest.raises(ValueError, match="score greedy samples at 1"):
        token_log_probs(hidden, weight, targets, temperature=0.0)


@pytest.mark.parametrize("chunk", [1, 50, 29 * 13, 1 << 20])
@pytest.mark.parametrize("block", [1, 60, 1 << 20])
@pytest.mark.parametrize("gradient", [1, 20, 1 << 20])
def test_any_sizes_give_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, chunk: int, block: int, gradient: int
) -> None:
    monkeypatch.setattr(memory, "CPU", HeadSizes(chunk, block, gradient))
    hidden, weight, bias, targets = inputs()
    expected = reference(hidden, weight, bias, targets, 0.7, 1.0, 4.0)
    found = token_log_probs(hidden, weight, targets, bias=bias, temperature=0.7, entropy=True, softcap=4.0)
    factors = torch.randn(2, N, dtype=torch.float64)
    leaves = [hidden, weight, bias]
    gradients = [torch.autograd.grad(torch.stack([*pair]).mul(factors).sum(), leaves) for pair in (found, expected)]
    for a, b in [*zip(found, expected, strict=True), *zip(*gradients, strict=True)]:
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


def test_an_accelerator_works_on_whole_chunks_of_a_size_that_its_memory_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host's memory is not asked; nor is what is free, so that sums repeat."""

    def host() -> int:
        raise AssertionError("the host was asked about a device's memory")

    there = Fake("cpu", free=0)  # an accelerator on which the head can run
    monkeypatch.setattr(device, "_accelerators", lambda: there)
    monkeypatch.setattr(device, "_free_on_host", host)
    assert HeadSizes.on("cpu:1") == HeadSizes(*[(80 << 30) // 512] * 3)
    there = Fake("cpu")
    monkeypatch.setattr(there, "get_memory_info", lambda name: (0, 512 * 3 * V))
    blocks = []
    monkeypatch.setattr(log_probs, "_softmax_rows", lambda product, *_: blocks.extend(_block_shapes(product)))
    hidden, weight, _, targets = inputs()
    token_log_probs(hidden, weight, targets)
    assert blocks == [(3, V)] * 4 + [(1, V)]


def _block_shapes(product: Tensor) -> list[tuple[int, ...]]:
    blocks = log_probs._logits(product, torch.float64, log_probs._Options(1.0, None, 1.0, False, 1, None))
    return [tuple(logits.shape) for _, logits, _ in blocks]
