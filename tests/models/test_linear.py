"""The linear map of the compiled kernels against exact sums."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from verl.models.kernels import kernels, linear


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 47, 300])
@pytest.mark.parametrize(("inner", "columns"), [(32, 16), (96, 48), (576, 192), (40, 24), (32, 2048), (48, 20)])
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


def test_inputs_with_gaps_are_read_as_they_are() -> None:
    x, weight = torch.randn(20, 128).bfloat16(), torch.randn(64, 64).bfloat16()
    torch.testing.assert_close(linear(x[:, ::2], weight), linear(x[:, ::2].contiguous(), weight))
    out = torch.zeros(20, 128, dtype=torch.bfloat16)[:, :64]
    torch.testing.assert_close(linear(x[:, :64], weight, out=out), linear(x[:, :64].contiguous(), weight))


@pytest.mark.skipif(kernels(torch.float32, torch.device("cpu")) is None, reason="no compiler here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_the_same_in_any_company(threads: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(170, 576).to(dtype), torch.randn(2048, 576).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = linear(x, weight)
        for start, stop in ((0, 1), (3, 20), (169, 170), (10, 170), *((20, 21 + count) for count in range(40))):
            assert torch.equal(linear(x[start:stop], weight), whole[start:stop])
        assert torch.equal(linear(x, weight[:208]), whole[:, :208])
        torch.set_num_threads(3 - threads)
        assert torch.equal(linear(x, weight), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.skipif(kernels(torch.float32, torch.device("cpu")) is None, reason="no compiler here")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have other names")
@pytest.mark.parametrize("processor", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_kernels_for_lesser_processors_compute_the_same(processor: str, tmp_path: Path) -> None:
    # Vectors of 16, 32 and 64 bytes, without products of bf16: as far as this machine has them.
    needed = {"x86-64-v2": "sse4_2", "x86-64-v3": "avx2", "x86-64-v4": "avx512vl"}[processor]
    if needed not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"no {needed} here")
    script = (
        "import sys, pytest\n"
        "import verl.models.kernels as kernels\n"
        f"kernels._FLAGS = tuple(f.replace('native', '{processor}') for f in kernels._FLAGS)\n"
        f"assert '-march={processor}' in kernels._FLAGS and kernels.library() is not None\n"
        "names = ['models/test_linear', 'models/test_llama', 'models/test_attention', 'rollout/test_kernel']\n"
        "files = [f'tests/{name}.py' for name in names]\n"
        "sys.exit(pytest.main(['-qx', '-m', 'not slow', '-p', 'no:cacheprovider', *files]))\n"
    )
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=env,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
