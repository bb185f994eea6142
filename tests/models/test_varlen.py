"""Training's path on a GPU, with a plain stand-in for the kernel, against the path of the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.models.test_packed import PROMPTS, RESPONSES, Make, difference, gradients, log_probs
from tests.properties import examples
from tests.varlen import varlen_attn
from verl.attention import flash, varlen
from verl.attention.segments import Row, Segments, attend, pack_rows
from verl.models.packed import PackedModel
from verl.rollout.embedded.attention import BatchTensors, PagedAttention
from verl.rollout.embedded.kv_cache import KVCache
from verl.rollout.embedded.scheduler import ScheduledBatch

SCALE = 0.3


@pytest.fixture
def with_kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every attention of training takes the stand-in; the list counts its calls."""
    calls: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return varlen_attn(*args, **kwargs)

    monkeypatch.setattr(flash, "flash_attention", lambda value: counted)
    return calls


@st.composite
def flat_rows(draw: st.DrawFn) -> list[Row]:
    """Prompts, each alone or before responses that share it, and before others that share one of these."""
    rows: list[Row] = []
    start = 0
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(st.integers(1, 9))
        first = start
        rows.append(Row(start, prompt))
        start += prompt
        parents = [Row(first, prompt)]
        for length in draw(st.lists(st.integers(1, 7), max_size=4)):
            parents.append(Row(start, length, draw(st.sampled_from(parents))))
            rows.append(parents[-1])
            start += length
    return rows


@examples(60)
@given(flat_rows(), st.sampled_from([None, 1, 3, 100]), st.sampled_from([(4, 4), (6, 2), (3, 1)]))
def test_ragged_rows_equal_buckets(rows: list[Row], window: int | None, heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    size = sum(row.length for row in rows)
    inputs = [torch.randn(size, n, 8, dtype=torch.float64, requires_grad=True) for n in (heads[0], heads[1], heads[1])]
    outer = torch.randn(size, heads[0], 8, dtype=torch.float64)
    expected = attend(*inputs, Segments(rows, (), torch.device("cpu")).buckets, SCALE, window)
    output = varlen.VarlenKeys(rows).attend(varlen_attn, *inputs, SCALE, window)
    assert (output - expected).abs().max() < 1e-12
    wanted = torch.autograd.grad(expected, inputs, outer)
    for one, other in zip(torch.autograd.grad(output, inputs, outer), wanted, strict=True):
        assert (one - other).abs().max() < 1e-12


def keys_of(query: Tensor, key: Tensor, *_: Any, **__: Any) -> Tensor:
    """A kernel that shows the keys that it is given."""
    return key


def test_rows_without_a_prefix_are_not_gathered() -> None:
    ragged = varlen.VarlenKeys([Row(0, 3), Row(3, 2)])
    x = torch.randn(5, 1, 8)
    assert ragged.attend(keys_of, x, x, x, SCALE, None) is x
    assert ragged.cu_seq_q.tolist() == ragged.cu_seq_k.tolist() == [0, 3, 5]


def test_copies_of_a_prefix_add_up_in_fp32() -> None:
    """In bf16 1 + 8 x 2^-9 would stay 1."""
    rows = [Row(0, 1), *(Row(n, 1, Row(0, 1)) for n in range(1, 9))]
    ragged = varlen.VarlenKeys(rows)
    x = torch.zeros(9, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.full((17, 1, 1), 2.0**-9, dtype=torch.bfloat16)
    gradient[0] = 1
    ragged.attend(keys_of, x, x, x, SCALE, None).backward(gradient)
    assert x.grad is not None and x.grad[0].item() == torch.tensor(1 + 2.0**-6).bfloat16().item()


def test_the_cpu_has_no_such_kernel() -> None:
    assert flash.flash_attention(torch.zeros(1, 1, 8, dtype=torch.bfloat16)) is None


def test_a_packed_micro_batch_goes_through_the_kernel(with_kernel: list[int]) -> None:
    packed = pack_rows([[1, 2, 3]] * 2 + [[4, 5]], [[6, 7, 8], [9, 10], [11, 12, 13]])
    size = len(packed.tokens)
    inputs = [torch.randn(size, n, 8, dtype=torch.float64) for n in (4, 2, 2)]
    output = packed.context.attend(0, *inputs, SCALE, None)
    assert len(with_kernel) == 1
    expected = attend(*inputs, packed.context.buckets, SCALE, None)
    assert (output - expected).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "phi3", "mistral"])
def test_log_probs_and_gradients_of_models_are_those_of_the_cpu(
    make_model: Make, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    packed = PackedModel(make_model(kind))
    expected = log_probs(packed, pack_rows(PROMPTS, RESPONSES))
    expected_gradient = gradients(packed.model, expected)
    monkeypatch.setattr(flash, "flash_attention", lambda value: varlen_attn)
    for share in (True, False):
        values = log_probs(packed, pack_rows(PROMPTS, RESPONSES, share_prompts=share))
        assert (values - expected).abs().max() < 1e-10
        assert difference(gradients(packed.model, values), expected_gradient) < 1e-10


def half(size: int = 64) -> Any:
    """Values of a GPU, as far as the choice of a kernel looks at them."""
    return SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(5, 2, size))


Package = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def looked_for() -> Iterator[None]:
    """The package flash-attn is looked for anew, here and afterwards."""
    flash._package_kernel.cache_clear()
    yield
    flash._package_kernel.cache_clear()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, looked_for: None) -> Package:
    """Makes a stand-in for the package flash-attn, of a release that splits keys of a page table or of 2.5 to 2.8,
    which does not; gives what its calls are given by name."""
    calls: list[dict[str, Any]] = []

    def older(
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
        return newer(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size, deterministic, block_table, 1,
        )  # fmt: skip

    def newer(
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
        num_splits: int | None = None,
    ) -> Tensor:
        calls.append({"deterministic": deterministic, "window_size": window_size})
        assert not dropout_p
        lengths: dict[str, Any] = {}
        if block_table is not None:
            lengths = {"seqused_k": cu_seqlens_k.diff(), "block_table": block_table, "num_splits": num_splits}
        if causal:
            window_size = (window_size[0], 0)
        return varlen_attn(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale=softmax_scale,
            window_size=window_size, enable_gqa=True, page=4, **lengths,
        )  # fmt: skip

    def make(splits: bool) -> list[dict[str, Any]]:
        module = ModuleType("flash_attn")
        module.flash_attn_varlen_func = newer if splits else older  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flash_attn", module)
        return calls

    monkeypatch.setattr(flash, "_torch_kernel", lambda paged: None)
    return make


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("splits", [False, True])
def test_an_older_torch_takes_the_package(package: Package, window: int | None, splits: bool) -> None:
    calls = package(splits)
    kernel = flash.flash_attention(half())
    assert kernel is not None and not flash.takes_splits(kernel, half())
    rows = [Row(0, 4), Row(4, 3, Row(0, 4)), Row(7, 2, Row(0, 4))]
    inputs = [torch.randn(9, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    expected = attend(*inputs, Segments(rows, (), torch.device("cpu")).buckets, SCALE, window)
    found = varlen.VarlenKeys(rows).attend(kernel, *inputs, SCALE, window)
    assert (found - expected).abs().max() < 1e-12
    assert [call["deterministic"] for call in calls] == [True]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("queries", [1, 2])
def test_the_package_reads_a_paged_cache(package: Package, window: int | None, splits: bool, queries: int) -> None:
    """In a decode step without a window the query heads of a group are folded."""
    calls = package(splits)
    cache = KVCache(6, 1, 2, 8, torch.float64, torch.device("cpu"), compiled=False)
    plan = ScheduledBatch(cache.block)
    plan.add([1] * queries, 40, [3, 1], 0)
    plan.add([1], 5, [2], 0)
    for pool in (cache.keys, cache.values):
        pool.normal_()
    inputs = [torch.randn(queries + 1, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    tensors = BatchTensors.of(plan, cache.device)
    expected = PagedAttention(cache, tensors).attend(0, *inputs, SCALE, window)
    with pytest.MonkeyPatch.context() as patch:
        kernel = flash.flash_attention(half(), paged=True)
        patch.setattr(flash, "flash_attention", lambda value, paged: kernel)
        found = PagedAttention(cache, tensors).attend(0, *inputs, SCALE, window)
    assert (found - expected).abs().max() < 1e-12
    whole = (-1, -1) if queries == 1 else (-1, 0)
    assert [call["window_size"] for call in calls] == [whole if window is None else (2, 0)]


def older_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """As torch 2.11 has it: heads need not be as many, and there are no pages."""
    sizes = (cu_seq_q, cu_seq_k, max_q, max_k)
    return varlen_attn(query, key, value, *sizes, scale=scale, window_size=window_size, enable_gqa=True)


@pytest.mark.usefixtures("looked_for")
@pytest.mark.parametrize("window", [None, 3])
def test_a_torch_without_pages_takes_its_kernel_for_training(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older_varlen_attn)
    assert flash.flash_attention(half(), paged=True) is None
    kernel = flash.flash_attention(half())
    assert kernel is not None
    rows = [Row(0, 4), Row(4, 3, Row(0, 4))]
    inputs = [torch.randn(7, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    expected = attend(*inputs, Segments(rows, (), torch.device("cpu")).buckets, SCALE, window)
    found = varlen.VarlenKeys(rows).attend(kernel, *inputs, SCALE, window)
    assert (found - expected).abs().max() < 1e-12


@pytest.mark.usefixtures("looked_for")
def test_without_either_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(flash, "_torch_kernel", lambda paged: None)
    assert flash.flash_attention(half()) is None
