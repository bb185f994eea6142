"""The compiled kernels against the torch operations they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from verl.kernels.interface import Kernels
from verl.models.compiled import kernels
from verl.rollout.attention import PagedAttention, Plan
from verl.rollout.kv_cache import BLOCK, KVCache

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
    compiled(dtype).rms_norm(x, delta, weight, 1e-5, out)
    assert torch.equal(x, total)
    torch.testing.assert_close(out, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert (out != expected).float().mean() < 0.02 or dtype == torch.float32
    compiled(dtype).rms_norm(x, None, weight, 1e-5, out)
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
    compiled(dtype).rotate(x, cos, sin)
    torch.testing.assert_close(x, expected, rtol=0 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@elementwise
def test_silu_mul(dtype: torch.dtype) -> None:
    gate = torch.linspace(-120, 120, 4096).to(dtype)
    up = torch.randn(4096).to(dtype)
    expected = F.silu(gate) * up
    compiled(dtype).silu_mul(gate, up, gate)
    torch.testing.assert_close(gate, expected, rtol=1e-2 if dtype == torch.bfloat16 else 2e-6, atol=1e-20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["fp32", "fp64", "bf16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(1, 1, 8), (3, 1, 33), (6, 2, 80), (9, 3, 64), (7, 1, 64), (8, 8, 40), (16, 2, 18), (12, 2, 128)],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 1, 20, 70])
def test_attention_is_that_of_torch(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, window: int | None
) -> None:
    """A prompt read in two chunks, then responses of different lengths, one of them read as a chunk."""
    torch.manual_seed(0)
    prompt_blocks, own = list(range(10)), [[10 + i] for i in range(5)] + [[15, 16]]
    caches = [KVCache(20, 1, kv_heads, size, dtype, CPU) for _ in range(2)]
    for cache in caches:  # what was never written must not matter
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
    for step in range(4):
        plan = Plan(heads // kv_heads)
        if step < 2:
            plan.add_prompt([0] * (150 + step), 150 * step, prompt_blocks)
        elif step == 2:
            for blocks in own:
                plan.add_own([0], 0, 301, prompt_blocks, blocks)
        else:
            for i, blocks in enumerate(own):
                plan.add_own([0] * (BLOCK + 5 if i == 5 else 1), 1, 301, prompt_blocks, blocks)
        tokens = len(plan.tokens)
        # As projections give them: a view with the heads inside.
        query = torch.randn(heads, tokens, size).to(dtype).transpose(0, 1)
        key, value = torch.randn(2, tokens, kv_heads, size).to(dtype)
        results = [
            PagedAttention(cache, plan, use).attend(0, query, key, value, size**-0.5, window)
            for cache, use in zip(caches, (True, False), strict=True)
        ]
        tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=tolerance)
        assert bool(results[0].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("window", [None, 50])
def test_a_token_sees_the_same_in_any_company(dtype: torch.dtype, group: int, window: int | None) -> None:
    """Forty responses of all lengths to one prompt, in tiles; then each in a step of its own."""
    torch.manual_seed(0)
    cache = KVCache(90, 1, 2, 40, dtype, CPU)
    cache.keys.normal_()
    cache.values.normal_()
    prompt, own = list(range(10)), [[10 + 2 * i, 11 + 2 * i] for i in range(40)]
    lengths = [(7 * i) % 64 for i in range(40)]
    query, key, value = torch.randn(40, 2 * group, 40).to(dtype), *torch.randn(2, 40, 2, 40).to(dtype)

    def attend(rows: list[int]) -> torch.Tensor:
        plan = Plan(group)
        for i in rows:
            plan.add_own([0], lengths[i], 301, prompt, own[i])
        return PagedAttention(cache, plan).attend(0, query[rows], key[rows], value[rows], 0.2, window)

    together = attend(list(range(40)))
    for i in range(40):
        assert torch.equal(attend([i])[0], together[i])
    assert torch.equal(attend(list(range(13, 30))), together[13:30])
