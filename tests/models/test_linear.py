"""The linear map of the compiled kernels against exact sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from verl.models.kernels import _linear_bf16, gated_linear, linear, linears


@pytest.mark.parametrize("rows", [0, 1, 13, 14, 15, 200])
@pytest.mark.parametrize(("inner", "columns"), [(32, 16), (96, 48), (576, 192), (40, 24)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_the_sum(rows: int, inner: int, columns: int, biased: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, inner, dtype=dtype), torch.randn(columns, inner, dtype=dtype)
    bias = torch.randn(columns, dtype=dtype) if biased else None
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    out = torch.full((rows, columns), torch.nan, dtype=dtype)
    assert linear(x, weight, bias, out) is out
    # fp32 sums of `inner` products, then one rounding.
    scale = (x.double().abs() @ weight.double().abs().t()) * 1e-6 + exact.abs() * torch.finfo(dtype).eps
    assert bool(((out.double() - exact).abs() <= scale + 1e-6).all())
    assert torch.equal(linear(x, weight, bias), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 40])
def test_several_maps_of_one_input_are_each_as_alone(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 96, dtype=dtype)
    maps = [
        (torch.randn(n, 96, dtype=dtype), torch.randn(n, dtype=dtype) if biased else None)
        for n, biased in ((80, True), (16, False), (48, True))
    ]
    outs = [torch.full((rows, len(weight)), torch.nan, dtype=dtype) for weight, _ in maps]
    linears(x, maps, outs)
    for (weight, bias), out in zip(maps, outs, strict=True):
        assert torch.equal(out, linear(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("inner", "columns"), [(96, 48), (64, 16), (40, 24), (33, 5)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_gated_map_rounds_as_its_three_steps(inner: int, columns: int, biased: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(31, inner, dtype=dtype)
    weights = torch.randn(2, columns, inner, dtype=dtype)
    gate, up = ((weight, torch.randn(columns, dtype=dtype) if biased else None) for weight in weights)
    expected = F.silu(linear(x, *gate)) * linear(x, *up)
    out = torch.full_like(expected, torch.nan)
    gated_linear(x, gate, up, out)
    torch.testing.assert_close(out, expected, rtol=1e-2 if dtype == torch.bfloat16 else 2e-6, atol=1e-6)
    assert (out != expected).float().mean() < 0.02 or dtype == torch.float32


def test_inputs_with_gaps_are_read_as_they_are() -> None:
    x, weight = torch.randn(20, 128).bfloat16(), torch.randn(64, 64).bfloat16()
    torch.testing.assert_close(linear(x[:, ::2], weight), linear(x[:, ::2].contiguous(), weight))
    out = torch.zeros(20, 128, dtype=torch.bfloat16)[:, :64]
    torch.testing.assert_close(linear(x[:, :64], weight, out=out), linear(x[:, :64].contiguous(), weight))


@pytest.mark.skipif(_linear_bf16() is None, reason="this processor multiplies no pairs of bf16")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_the_same_in_any_company(threads: int) -> None:
    x, weight = torch.randn(70, 576).bfloat16(), torch.randn(208, 576).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = linear(x, weight)
        for start, stop in ((0, 1), (3, 20), (69, 70), (10, 70), *((20, 21 + count) for count in range(40))):
            assert torch.equal(linear(x[start:stop], weight), whole[start:stop])
        torch.set_num_threads(1)
        assert torch.equal(linear(x, weight), whole)
    finally:
        torch.set_num_threads(before)
