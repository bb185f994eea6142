"""The compiled kernels against the torch operations they stand for."""

from __future__ import annotations

import inspect
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.attention.varlen
import torch.nn.functional as F

from verl.kernels.compiled import Kernels, kernels
from verl.rollout.embedded.attention import BatchTensors, PagedAttention, copy_blocks, varlen_attn
from verl.rollout.embedded.kv_cache import BLOCK, KVCache
from verl.rollout.embedded.scheduler import ScheduledBatch

CPU = torch.device("cpu")
elementwise = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def compiled(dtype: torch.dtype) -> Kernels:
    found = kernels(dtype, CPU)
    assert found is not None, "the kernels must build where the tests run"
    return found


def test_no_second_openmp_runtime_is_loaded() -> None:
    def runtimes() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[-1] for line in lines if "libgomp" in line or "libiomp" in line or "libomp" in line}

    before = runtimes()
    compiled(torch.float32)
    assert runtimes() == before


def test_only_cpu_dtypes_with_kernels_have_them() -> None:
    assert kernels(torch.float16, CPU) is None
    assert kernels(torch.float32, torch.device("meta")) is None


@elementwise
@pytest.mark.parametrize("rows", [1, 300])
def test_rms_norm_rounds_as_the_torch_operations_do(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    x, delta, weight = torch.randn(rows, 192), torch.randn(rows, 192), torch.randn(192)
    x, delta, weight = x.to(dtype), delta.to(dtype), weight.to(dtype)
    total = x + delta
    states = total.float()
    expected = weight * (states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-5)).to(dtype)
    out = torch.empty_like(x)
    compiled(dtype).rms_norm(x, delta, weight, out, *x.shape, 1e-5)
    assert torch.equal(x, total)
    torch.testing.assert_close(out, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert (out != expected).float().mean() < 0.02 or dtype == torch.float32
    compiled(dtype).rms_norm(x, None, weight, out, *x.shape, 1e-5)
    assert torch.equal(x, total)


@elementwise
@pytest.mark.parametrize("rotary", [32, 64])
def test_rotate_is_the_rotary_embedding(dtype: torch.dtype, rotary: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(70, 3, 64).to(dtype)
    cos, sin = torch.randn(70, rotary).to(dtype), torch.randn(70, rotary).to(dtype)
    turned = x[..., :rotary]
    half = torch.cat([-turned[..., rotary // 2 :], turned[..., : rotary // 2]], -1)
    expected = torch.cat([turned * cos[:, None] + half * sin[:, None], x[..., rotary:]], -1)
    compiled(dtype).rotate(x, cos, sin, *x.shape, rotary)
    torch.testing.assert_close(x, expected, rtol=0 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@elementwise
def test_silu_mul(dtype: torch.dtype) -> None:
    gate = torch.linspace(-120, 120, 4096).to(dtype)
    up = torch.randn(4096).to(dtype)
    expected = F.silu(gate) * up
    compiled(dtype).silu_mul(gate, up, gate, gate.numel())
    torch.testing.assert_close(gate, expected, rtol=1e-2 if dtype == torch.bfloat16 else 2e-6, atol=1e-20)


def plain_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """The same attention once more, one sequence after the other, by torch's own operator in fp64."""
    out = torch.empty(query.shape, dtype=torch.float64)
    for n, (begin, end) in enumerate(pairwise(cu_seq_q.tolist())):
        used, count = int(seqused_k[n]), end - begin
        assert count <= max_q and used <= max_k
        k, v = (pool[block_table[n].long()].flatten(0, 1)[:used].double().transpose(0, 1) for pool in (key, value))
        at, seen = torch.arange(used - count, used)[:, None], torch.arange(used)
        mask = (seen <= at) & ((window_size[0] < 0) | (seen >= at - window_size[0]))
        q = query[begin:end].double().transpose(0, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        out[begin:end] = mixed.transpose(0, 1)
    return out


def test_attention_has_the_arguments_of_torch() -> None:
    theirs = list(inspect.signature(torch.nn.attention.varlen.varlen_attn).parameters)
    for ours in (varlen_attn, plain_attn):
        names = [name for name in inspect.signature(ours).parameters if name != "rows"]
        assert names == [name for name in theirs if name in names]
        assert set(theirs) - set(names) == {"return_aux", "num_splits"}


DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
HEADS = [(1, 1, 8), (3, 1, 33), (6, 2, 80), (9, 3, 64), (7, 1, 64), (8, 8, 40), (16, 2, 18), (12, 2, 128)]
WINDOWS = [None, 1, 20, 70]


def cases(turn: int) -> list[tuple[str, tuple[int, int, int], int | None]]:
    """A third of the product of types, heads and windows, in which every two values of two of them meet."""
    return [
        (list(DTYPES)[(i + j + turn) % len(DTYPES)], heads, window)
        for i, heads in enumerate(HEADS)
        for j, window in enumerate(WINDOWS)
    ]


@pytest.mark.quick(every=13)
@pytest.mark.parametrize(("dtype", "heads", "window"), cases(0), ids=str)
def test_attention_over_a_paged_cache(dtype: str, heads: tuple[int, int, int], window: int | None) -> None:
    compare_attention(DTYPES[dtype], *heads, window)


@pytest.mark.slow
@pytest.mark.parametrize("turn", [1, 2])
def test_attention_over_a_paged_cache_of_every_type(turn: int) -> None:
    for dtype, heads, window in cases(turn):
        compare_attention(DTYPES[dtype], *heads, window)


def compare_attention(dtype: torch.dtype, heads: int, kv_heads: int, size: int, window: int | None) -> None:
    """A prompt read in two chunks, then responses of different lengths, one of them read as a chunk."""
    torch.manual_seed(0)
    prompt, own = list(range(10)), [[10 + i] for i in range(5)] + [[15, 16, 17]]
    caches = [KVCache(20, 1, kv_heads, size, dtype, CPU, compiled) for compiled in (True, False)]
    assert [cache.kernels is not None for cache in caches] == [True, False]
    for cache in caches:  # what was never written must not matter
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
    for step in range(4):
        plan = ScheduledBatch()
        if step < 2:
            plan.add([0] * (150 + step), 150 * step, prompt, len(prompt))
        else:
            if step == 2:
                for cache in caches:
                    copy_blocks(cache, [(prompt[-1], blocks[0]) for blocks in own])
            for i, blocks in enumerate(own):
                count = BLOCK + 5 if step == 3 and i == 5 else 1
                plan.add([0] * count, 301 + step - 2, [*prompt[:9], *blocks], 9)
        tokens = len(plan.tokens)
        # As projections give them: a view with the heads inside; two rows of padding behind.
        query = torch.randn(heads, tokens + 2, size).to(dtype).transpose(0, 1)
        key, value = torch.randn(2, tokens + 2, kv_heads, size).to(dtype)
        plain, tables = caches[1], BatchTensors.of(plan, CPU)
        results = [PagedAttention(cache, tables).attend(0, query, key, value, size**-0.5, window) for cache in caches]
        expected = plain_attn(
            query[:tokens],
            plain.keys[0],
            plain.values[0],
            tables.cu_seq_q,
            None,
            tables.max_q,
            tables.max_k,
            scale=size**-0.5,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=heads != kv_heads,
            seqused_k=tables.seqused_k,
            block_table=tables.block_table,
        )
        tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
        for result in results:
            torch.testing.assert_close(result[:tokens].double(), expected, rtol=0, atol=tolerance)
            assert not result[tokens:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("window", [None, 50])
def test_a_token_sees_the_same_in_any_company(dtype: torch.dtype, group: int, window: int | None) -> None:
    """Forty responses of all lengths to one prompt, in tiles; then each in a step of its own."""
    torch.manual_seed(0)
    cache = KVCache(140, 1, 2, 40, dtype, CPU)
    cache.keys.normal_()
    cache.values.normal_()
    prompt, own = list(range(9)), [[10 + 3 * i, 11 + 3 * i, 12 + 3 * i] for i in range(40)]
    lengths = [(7 * i) % 64 for i in range(40)]
    query, key, value = torch.randn(40, 2 * group, 40).to(dtype), *torch.randn(2, 40, 2, 40).to(dtype)

    def attend(rows: list[int]) -> torch.Tensor:
        plan = ScheduledBatch()
        for i in rows:
            plan.add([0], 301 + lengths[i], [*prompt, *own[i]], len(prompt))
        tables = BatchTensors.of(plan, CPU)
        return PagedAttention(cache, tables).attend(0, query[rows], key[rows], value[rows], 0.2, window)

    together = attend(list(range(40)))
    for i in range(40):
        assert torch.equal(attend([i])[0], together[i])
    assert torch.equal(attend(list(range(13, 30))), together[13:30])


def test_a_plan_is_divided_within_sequences() -> None:
    plan = ScheduledBatch()
    plan.add(range(100, 150), 20, [3, 1, 2], 3)
    plan.add([7], 40, [4, 5], 1)
    parts = plan.split(20)
    assert [part.tokens for part in parts] == [[*range(100, 120)], [*range(120, 140)], [*range(140, 150), 7]]
    assert [part.positions for part in parts] == [[*range(20, 40)], [*range(40, 60)], [*range(60, 70), 40]]
    assert [part.used for part in parts] == [[40], [60], [70, 41]]
    assert [part.blocks for part in parts] == [[[3, 1]], [[3, 1]], [[3, 1, 2], [4, 5]]]
    assert [part.shared for part in parts] == [[2], [2], [3, 1]]
