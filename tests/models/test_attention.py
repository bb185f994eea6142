"""The two ways of attention against each other and against a dense mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from verl.models import attention
from verl.models.attention import Bucket, attend, sdpa_attend

SCALE = 0.3
# A ragged bucket of plain rows, the first two of which are prefixes of ragged and of equal branches.
BUCKETS = [([6, 5, 3], (0, 0)), ([4, 2, 1], (0, 6)), ([3, 3], (6, 5))]
TOTAL = 14 + 7 + 6


def make_buckets() -> list[Bucket]:
    starts = [0, 14, 21]
    return [Bucket(start, lengths, prefix) for start, (lengths, prefix) in zip(starts, BUCKETS, strict=True)]


def visible(window: int | None) -> Tensor:
    """Token x token, written out from the description of the buckets."""
    mask = torch.zeros(TOTAL, TOTAL, dtype=torch.bool)
    for bucket in make_buckets():
        start = bucket.start
        for length in bucket.lengths:
            before, size = bucket.prefix
            seen = [*range(before, before + size), *range(start, start + length)]
            for i in range(length):
                row = seen[: size + i + 1]
                mask[start + i, row if window is None else row[-window:]] = True
            start += length
    return mask


def dense(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible(window), float("-inf")).softmax(-1), value)


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
