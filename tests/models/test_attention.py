"""The two ways of attention against each other and against a dense mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from verl.attention import segments as attention
from verl.attention.segments import Bucket, Row, attend, sdpa_attend

SCALE = 0.3
# Three plain rows; the first two are prefixes of rows that stand in one bucket, and of another bucket.
BUCKETS = [
    [Row(0, 6), Row(6, 5), Row(11, 3)],
    [Row(14, 4, Row(0, 6)), Row(18, 2, Row(0, 6)), Row(20, 1, Row(6, 5)), Row(21, 3, Row(6, 5))],
    [Row(24, 3, Row(0, 6))],
    # Two more levels of forks, beside each other and beside rows with shorter prefixes.
    [Row(27, 2, Row(18, 2, Row(0, 6))), Row(29, 5, Row(14, 4, Row(0, 6))), Row(34, 3, Row(21, 3, Row(6, 5)))],
    [Row(37, 4, Row(29, 5, Row(14, 4, Row(0, 6)))), Row(41, 1, Row(29, 5, Row(14, 4, Row(0, 6)))), Row(42, 5)],
]
TOTAL = 47


def make_buckets() -> list[Bucket]:
    return [Bucket(rows) for rows in BUCKETS]


def visible(window: int | None) -> Tensor:
    """Token x token, written out from the description of the rows."""
    mask = torch.zeros(TOTAL, TOTAL, dtype=torch.bool)
    for row in (row for rows in BUCKETS for row in rows):
        before = row.prefix.tolist()
        seen = [*before, *range(row.start, row.start + row.length)]
        for i in range(row.length):
            keys = seen[: len(before) + i + 1]
            mask[row.start + i, keys if window is None else keys[-window:]] = True
    return mask


def dense(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible(window), float("-inf")).softmax(-1), value)


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("piece", [1, 30, attention.PIECE])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
def test_both_ways_equal_a_dense_mask(
    monkeypatch: pytest.MonkeyPatch, piece: int, window: int | None, heads: tuple[int, int]
) -> None:
    monkeypatch.setattr(attention, "PIECE", piece)
    torch.manual_seed(0)
    inputs = [torch.randn(TOTAL, n, 8, dtype=torch.float64, requires_grad=True) for n in (heads[0], heads[1], heads[1])]
    outer = torch.randn(TOTAL, heads[0], 8, dtype=torch.float64)
    expected = dense(*inputs, window)
    gradients = torch.autograd.grad(expected, inputs, outer)
    for way in (attend, sdpa_attend):
        output = way(*inputs, make_buckets(), SCALE, window)
        assert (output - expected).abs().max() < 1e-12
        for found, wanted in zip(torch.autograd.grad(output, inputs, outer), gradients, strict=True):
            assert (found - wanted).abs().max() < 1e-12


def test_transposed_inputs_and_mixed_precision() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(n, TOTAL, 8).transpose(0, 1) for n in (4, 2, 2))
    expected = attend(query.contiguous(), key.contiguous(), value.contiguous(), make_buckets(), SCALE, None)
    assert torch.allclose(attend(query, key, value, make_buckets(), SCALE, None), expected, atol=1e-6)
    output = attend(query, key, value.bfloat16(), make_buckets(), SCALE, None)
    assert output.dtype == torch.bfloat16
    assert (output - expected).abs().max() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("piece", [30, attention.PIECE])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_compiled_steps_equal_a_dense_mask(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, piece: int, window: int | None
) -> None:
    monkeypatch.setattr(attention, "PIECE", piece)
    torch.manual_seed(0)
    inputs = [torch.randn(TOTAL, n, 32).to(dtype).requires_grad_() for n in (6, 2, 2)]
    outer = torch.randn(TOTAL, 6, 32).to(dtype)
    assert attention._Steps(make_buckets()[0], SCALE, 1, inputs[0]).kernels is not None
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = dense(*wide, window)
    gradients = torch.autograd.grad(expected, wide, outer.double())
    output = attend(*inputs, make_buckets(), SCALE, window)
    tolerance = 2e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    for found, wanted in zip(torch.autograd.grad(output, inputs, outer), gradients, strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("size", [8, 64], ids=["in torch", "compiled"])
def test_gradients_of_keys_and_values_do_not_get_worse_with_the_pieces(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(512, n, size).bfloat16().requires_grad_() for n in (4, 2, 2)]
    outer, buckets = torch.randn(512, 4, size).bfloat16(), [Bucket([Row(0, 512)])]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = torch.autograd.grad(attend(*wide, buckets, SCALE, None), wide, outer.double())
    monkeypatch.setattr(attention, "PIECE", 1024)  # 256 pieces, as a row of 4,096 tokens has
    gradients = torch.autograd.grad(attend(*inputs, buckets, SCALE, None), inputs, outer)
    for gradient, wanted in list(zip(gradients, exact, strict=True))[1:]:
        assert (gradient.double() - wanted).norm() < 0.008 * wanted.norm()  # sums in bf16: 0.02
