"""Training's path on a GPU, with a plain stand-in for the kernel, against the path of the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.properties import examples
from tests.models.test_packed import PROMPTS, RESPONSES, Make, difference, gradients, log_probs
from tests.varlen import varlen_attn
from verl.models import varlen
from verl.models.attention import Row, attend
from verl.models.packed import PackedModel
from verl.models.segments import _buckets, pack_rows

SCALE = 0.3


@pytest.fixture
def with_kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every attention of training takes the stand-in; the list counts its calls."""
    calls: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return varlen_attn(*args, **kwargs)

    monkeypatch.setattr(varlen, "flash_attention", lambda value: counted)
    return calls


@st.composite
def flat_rows(draw: st.DrawFn) -> list[Row]:
    """Prompts, each alone or before responses that share it."""
    rows: list[Row] = []
    start = 0
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(st.integers(1, 9))
        first = start
        rows.append(Row(start, prompt))
        start += prompt
        for length in draw(st.lists(st.integers(1, 7), max_size=4)):
            rows.append(Row(start, length, (first, prompt)))
            start += length
    return rows


@examples(60)
@given(flat_rows(), st.sampled_from([None, 1, 3, 100]), st.sampled_from([(4, 4), (6, 2), (3, 1)]))
def test_ragged_rows_equal_buckets(rows: list[Row], window: int | None, heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    size = sum(row.length for row in rows)
    inputs = [torch.randn(size, n, 8, dtype=torch.float64, requires_grad=True) for n in (heads[0], heads[1], heads[1])]
    outer = torch.randn(size, heads[0], 8, dtype=torch.float64)
    expected = attend(*inputs, _buckets(rows, torch.device("cpu")), SCALE, window)
    output = varlen.varlen_attend(varlen_attn, *inputs, varlen.Ragged(rows), SCALE, window)
    assert (output - expected).abs().max() < 1e-12
    wanted = torch.autograd.grad(expected, inputs, outer)
    for one, other in zip(torch.autograd.grad(output, inputs, outer), wanted, strict=True):
        assert (one - other).abs().max() < 1e-12


def test_rows_without_a_prefix_are_not_gathered() -> None:
    ragged = varlen.Ragged([Row(0, 3), Row(3, 2)])
    x = torch.randn(5, 1, 8)
    assert ragged.gather(x) is x
    assert ragged.cu_seq_q.tolist() == ragged.cu_seq_k.tolist() == [0, 3, 5]


def test_copies_of_a_prefix_add_up_in_fp32() -> None:
    """In bf16 1 + 8 x 2^-9 would stay 1."""
    rows = [Row(0, 1), *(Row(n, 1, (0, 1)) for n in range(1, 9))]
    ragged = varlen.Ragged(rows)
    x = torch.zeros(9, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.full((17, 1, 1), 2.0**-9, dtype=torch.bfloat16)
    gradient[0] = 1
    ragged.gather(x).backward(gradient)
    assert x.grad is not None and x.grad[0].item() == torch.tensor(1 + 2.0**-6).bfloat16().item()


def test_the_cpu_has_no_such_kernel() -> None:
    assert varlen.flash_attention(torch.zeros(1, 1, 8, dtype=torch.bfloat16)) is None


def test_a_packed_micro_batch_goes_through_the_kernel(with_kernel: list[int]) -> None:
    packed = pack_rows([[1, 2, 3]] * 2 + [[4, 5]], [[6, 7, 8], [9, 10], [11, 12, 13]])
    size = len(packed.tokens)
    inputs = [torch.randn(size, n, 8, dtype=torch.float64) for n in (4, 2, 2)]
    output = packed.context.attend(0, *inputs, SCALE, None)
    assert len(with_kernel) == 1
    expected = attend(*inputs, packed.context._buckets, SCALE, None)
    assert (output - expected).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "phi3", "mistral"])
def test_log_probs_and_gradients_of_models_are_those_of_the_cpu(
    make_model: Make, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    packed = PackedModel(make_model(kind))
    expected = log_probs(packed, pack_rows(PROMPTS, RESPONSES))
    expected_gradient = gradients(packed.model, expected)
    monkeypatch.setattr(varlen, "flash_attention", lambda value: varlen_attn)
    for share in (True, False):
        values = log_probs(packed, pack_rows(PROMPTS, RESPONSES, share_prompts=share))
        assert (values - expected).abs().max() < 1e-10
        assert difference(gradients(packed.model, values), expected_gradient) < 1e-10


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """A stand-in for the package flash-attn (2.5 or newer); the list has `deterministic` of its calls."""
    calls: list[bool] = []

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        calls.append(deterministic)
        assert causal and not dropout_p
        lengths = {} if block_table is None else {"seqused_k": cu_seqlens_k.diff(), "block_table": block_table}
        sizes = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        options = {"scale": softmax_scale, "window_size": window_size, "enable_gqa": True}
        return varlen_attn(q, k, v, *sizes, **options, **lengths)

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(varlen, "_torch_kernel", lambda: None)
    varlen._package_kernel.cache_clear()
    yield calls
    varlen._package_kernel.cache_clear()


@pytest.mark.parametrize("window", [None, 3])
def test_an_older_torch_takes_the_package(package: list[bool], window: int | None) -> None:
    half = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(5, 2, 64))
    kernel = varlen.flash_attention(half)  # type: ignore[arg-type]
    assert kernel is not None and not varlen.has_splits(kernel)
    rows = [Row(0, 4), Row(4, 3, (0, 4)), Row(7, 2, (0, 4))]
    inputs = [torch.randn(9, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    expected = attend(*inputs, _buckets(rows, torch.device("cpu")), SCALE, window)
    found = varlen.varlen_attend(kernel, *inputs, varlen.Ragged(rows), SCALE, window)
    assert (found - expected).abs().max() < 1e-12
    # Over a paged cache.
    pools = [torch.randn(6, 4, 2, 8, dtype=torch.float64) for _ in range(2)]
    tables = {
        "seqused_k": torch.tensor([5, 9], dtype=torch.int32),
        "block_table": torch.tensor([[3, 1, 0], [2, 5, 4]], dtype=torch.int32),
    }
    arguments = (inputs[0][:3], *pools, torch.tensor([0, 1, 3], dtype=torch.int32), None, 2, 9)
    options = {"scale": SCALE, "window_size": (-1 if window is None else window - 1, 0), "enable_gqa": True}
    expected = varlen_attn(*arguments, **options, **tables)
    assert (kernel(*arguments, **options, **tables) - expected).abs().max() < 1e-12
    assert package == [True, True]


def test_without_either_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(varlen, "_torch_kernel", lambda: None)
    varlen._package_kernel.cache_clear()
    assert (
        varlen.flash_attention(SimpleNamespace(device=torch.device("cuda"), dtype=torch.float16, shape=(1, 1, 64)))
        is None
    )  # type: ignore[arg-type]
    varlen._package_kernel.cache_clear()
