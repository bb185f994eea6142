"""`SplitAdamW`: the arithmetic of fp32 masters in fewer bytes; compiled and in torch."""

from __future__ import annotations

import gc
import importlib
import logging

import pytest
import torch
from torch import Tensor

from tests.test_device import Fake
from verl._host import device
from verl.kernels import inductor
from verl.training import adamw
from verl.training.gradients import Weight
from verl.training.optimizer import MixedPrecisionOptimizer
from verl.training.options import OptimConfig

in_all_codes = pytest.mark.parametrize(
    "code",
    ["compiled", "torch", pytest.param("fused", marks=pytest.mark.slow)],  # inductor compiles for 15 s
)


@pytest.fixture(autouse=True)
def _code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = request.node.callspec.params.get("code") if hasattr(request.node, "callspec") else None
    if chosen in ("torch", "fused"):
        monkeypatch.setattr(adamw, "kernels", lambda dtype, device: None)
    if chosen == "fused":  # as on an accelerator, by inductor's back end for CPU
        fused = torch.compile(adamw._update, dynamic=True, fullgraph=True)
        monkeypatch.setattr(adamw, "_code", lambda kind: (fused, adamw._LARGEST))
    elif chosen == "compiled":
        assert adamw.kernels(torch.bfloat16, torch.device("cpu")) is not None, (
            "the kernels must build where the tests run"
        )


def _weight(shape: tuple[int, ...] = (24, 16), seed: int = 0) -> Weight:
    generator = torch.Generator().manual_seed(seed)
    live = torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16())
    return Weight("w", live, live)


def _give(weight: Weight, gradient: Tensor) -> None:
    weight.gradient, weight.has_gradient = gradient.clone(), True


def _gradient(weight: Weight, seed: int) -> Tensor:
    return torch.randn(weight.live.shape, generator=torch.Generator().manual_seed(seed))


def _state(optimizer: adamw.SplitAdamW) -> dict[str, Tensor]:
    return {name: value.clone() for _, name, value in optimizer.state()}


@in_all_codes
@pytest.mark.parametrize("shape", [(24, 16), (7, 5)], ids=["vectors", "odd"])
def test_with_fp32_moments_it_is_torch_adamw_on_fp32_masters(code: str, shape: tuple[int, ...]) -> None:
    config = OptimConfig(betas=(0.8, 0.95), adam_eps=1e-7, weight_decay=0.1, moments="float32")
    weight = _weight(shape)
    master = torch.nn.Parameter(weight.live.detach().float())
    ours = adamw.SplitAdamW([weight], config)
    theirs = torch.optim.AdamW([master], lr=1e-2, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.1)
    for seed in range(6):
        gradient = _gradient(weight, seed)
        _give(weight, 4 * gradient)
        ours.step(1e-2, 0.25)
        master.grad = gradient
        theirs.step()
    state = _state(ours)
    torch.testing.assert_close(state["master"], master.detach(), rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(state["exp_avg_sq"], theirs.state[master]["exp_avg_sq"], rtol=2e-6, atol=1e-9)
    # The live weight is its master rounded to nearest.
    assert ((weight.live.float() - state["master"]).abs() <= state["master"].abs() * 2**-8).all()


@in_all_codes
def test_bf16_moments_are_right_on_average_and_to_their_precision(code: str) -> None:
    weight, exact = _weight((64, 64)), _weight((64, 64))
    rounded = adamw.SplitAdamW([weight], OptimConfig(moments="bfloat16"))
    reference = adamw.SplitAdamW([exact], OptimConfig(moments="float32"))
    for seed in range(200):
        _give(weight, _gradient(weight, seed))
        _give(exact, _gradient(weight, seed))
        rounded.step(1e-3, 1.0)
        reference.step(1e-3, 1.0)
    got, want = _state(rounded), _state(reference)
    assert got["exp_avg"].dtype == got["exp_avg_sq"].dtype == torch.bfloat16
    ratio = got["exp_avg_sq"].double() / want["exp_avg_sq"].double()
    # 200 roundings of at most 2^-8 each, of random sign: no drift over 4096 elements, and no large error in one.
    assert abs(float(ratio.mean()) - 1) < 2e-3
    assert float((ratio - 1).abs().max()) < 0.15
    moved = (want["master"] - _weight((64, 64)).live.detach().float()).norm()
    assert (got["master"] - want["master"]).norm() < 0.05 * moved


def test_rounding_to_nearest_would_stand_still_where_random_rounding_moves() -> None:
    weight = _weight((64, 64))
    optimizer = adamw.SplitAdamW([weight], OptimConfig(betas=(0.9, 0.999), moments="bfloat16"))
    for scale in (1.0, *([2.0] * 300)):  # v moves by a thousandth of its distance a step: below bf16's resolution
        _give(weight, torch.full(weight.live.shape, scale))
        optimizer.step(0.0, 1.0)
    expected = 4 + (0.001 - 4) * 0.999**300
    assert float(_state(optimizer)["exp_avg_sq"].double().mean()) == pytest.approx(expected, rel=0.01)


def test_compiled_and_torch_code_round_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for kernels in (adamw.kernels, lambda dtype, device: None):
        monkeypatch.setattr(adamw, "kernels", kernels)
        weight = _weight((64, 48))
        optimizer = adamw.SplitAdamW([weight], OptimConfig())
        for seed in range(3):
            _give(weight, _gradient(weight, seed))
            optimizer.step(1e-3, 1.0)
        found.append(_state(optimizer))
    a, b = found
    # The same random bits: only where the last bit of the arithmetic differs may a rounding differ.
    assert (a["exp_avg"] != b["exp_avg"]).float().mean() < 0.01
    torch.testing.assert_close(a["master"], b["master"], rtol=1e-4, atol=1e-6)


def test_splitting_a_master_loses_nothing() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (100_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    bits[:4] = torch.tensor([0x3F808000, 0x3F818000, 0x00000000, -(2**31)])  # halfway cases and both zeros
    master = bits.view(torch.float32)
    master = master[master.isfinite() & (master.abs() < 3e38)]
    live, remainder = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    adamw._split(master, live, remainder)
    assert torch.equal(adamw._master(live, remainder), master)
    assert (live != master.bfloat16()).float().mean() < 1e-3  # they differ where the master is halfway


@pytest.mark.parametrize(("moments", "expected"), [(None, 10), ("float32", 14)])
def test_a_bf16_weight_costs_ten_bytes_beside_itself(moments: str | None, expected: int) -> None:
    gc.collect()
    before = {id(t) for t in gc.get_objects() if isinstance(t, torch.Tensor)}
    model = torch.nn.Linear(64, 64, bias=False).bfloat16()
    optimizer = MixedPrecisionOptimizer({"w": model.weight}, OptimConfig(moments=moments))
    for last in (False, False, True):
        with optimizer.gradients.collecting():
            model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
        if not last:
            optimizer.step(optimizer.gradients.norm())
    gc.collect()
    held = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and id(t) not in before]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    assert sum(storages.values()) == (2 + expected) * model.weight.numel()


def test_a_weight_without_gradient_does_not_count_the_step() -> None:
    weight, other = _weight(), _weight(seed=1)
    optimizer = adamw.SplitAdamW([weight, other], OptimConfig(weight_decay=0.1))
    _give(weight, _gradient(weight, 0))
    before = other.live.detach().clone()
    optimizer.step(1e-2, 1.0)
    assert torch.equal(other.live, before)
    assert [name for _, name, _ in optimizer.state()].count("step") == 1
    assert not torch.equal(weight.live, _weight().live)


def _mixed_in_int64(x: Tensor) -> Tensor:
    """MurmurHash3's finaliser of numbers in [0, 2^32)."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & 0xFFFFFFFF
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


@pytest.mark.parametrize("start", [0, 2**30, 2**31 - 500, 2**32 - 500, 5 * 2**32 - 3, 7 * 2**31 + 11])
@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 0x9E3779B9])
def test_random_bits_in_int32_are_those_of_unsigned_numbers(start: int, seed: int) -> None:
    index = torch.arange(1000)
    want = _mixed_in_int64(((index + start) & 0xFFFFFFFF) ^ seed)
    got = adamw._mixed((index.int() + _number(start)) ^ adamw._signed(seed))
    assert got.dtype == torch.int32
    assert torch.equal(got.long() & 0xFFFFFFFF, want)


def _number(start: int) -> Tensor:
    return torch.full((), adamw._signed(start), dtype=torch.int32)


def _parts(count: int, moments: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(count)
    live, first, second, gradient = torch.randn(4, count, generator=draw)
    remainder = torch.randint(-(2**15), 2**15, (count,), generator=draw).to(torch.int16)
    return [live.bfloat16(), remainder, first.to(moments), second.square().to(moments), gradient]


def _ulps(a: Tensor, b: Tensor) -> int:
    """Largest distance of fp32 numbers of equal signs, in units of the last place."""
    return int((a.view(torch.int32).long() - b.view(torch.int32).long()).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_the_fused_kernel_is_compiled_once_for_all_sizes_and_steps(moments: torch.dtype) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fused = torch.compile(adamw._update, dynamic=True, fullgraph=True)
    for step, count in enumerate([64, 7, 5000, 33, 4096, 12345, 2], start=1):
        config = OptimConfig(betas=(0.8, 0.95), weight_decay=0.1)
        formula = adamw._formula(config, 1e-3 / step, 0.5 / step, step, adamw._signed(77777 * step * 99991), 0.1)
        one, other = _parts(count, moments), _parts(count, moments)
        start = _number(2**31 - 100)
        with torch.no_grad():
            adamw._update(*one, adamw._numbers(formula), start)
            fused(*other, adamw._numbers(formula), start)
        # A product and a sum may be rounded at once, in the divisor and in the master: each a unit in the last place of
        # the change of the master (at most |before| + |after|).
        before, want, got = (adamw._master(*parts[:2]) for parts in (_parts(count, moments), one, other))
        assert ((want - got).abs() <= 2**-22 * (before.abs() + want.abs())).all()
        assert (want != got).float().mean() < 0.01
        for a, b in zip(one[2:4], other[2:4], strict=True):
            assert _ulps(a.float(), b.float()) <= (1 if moments == torch.float32 else 1 << 16)
            assert (a != b).float().mean() <= (1 if moments == torch.float32 else 0.01)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.slow
def test_the_fused_kernel_is_one() -> None:
    from torch._inductor import metrics

    torch._dynamo.reset()
    metrics.reset()
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        formula = adamw._formula(OptimConfig(), 1e-3, 1.0, 1, 5, 0.0)
        fused = torch.compile(adamw._update, dynamic=True, fullgraph=True)
        fused(*_parts(4096, torch.bfloat16), adamw._numbers(formula), _number(0))
    assert metrics.generated_kernel_count == 1


def test_without_a_compiler_an_accelerator_takes_the_torch_code_in_blocks_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "_accelerators", lambda: Fake("cuda"))
    monkeypatch.setattr(inductor, "find_spec", lambda name: None)
    code = adamw._code.__wrapped__
    adamw._code.cache_clear()
    with caplog.at_level(logging.WARNING):
        found = [adamw._code("cuda") for _ in (0, 1)]
    assert found == [(adamw._update, (80 << 30) // 4000)] * 2
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "torch.compile needs triton here: pip install triton"
    ]
    adamw._code.cache_clear()
    monkeypatch.setattr(inductor, "find_spec", lambda name: name)
    assert code("cuda")[1] == adamw._LARGEST and code("cuda")[0] is not adamw._update


def test_fp32_weights_are_stepped_by_torchs_fused_kernel_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(theirs, "_get_fused_kernels_supported_devices", lambda: ["meta"])
    live = torch.nn.Parameter(torch.empty(8, 8, device="meta"))
    optimizer = MixedPrecisionOptimizer({"w": live}, OptimConfig())
    (weight,) = optimizer.gradients.weights
    weight.gradient, weight.has_gradient = torch.empty(8, 8, device="meta"), True
    optimizer.step(1.0)
    assert optimizer._optimizer.param_groups[0]["fused"] is True
    assert {value.device.type for _, value in optimizer.tensors()} == {"meta"}
