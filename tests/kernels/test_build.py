"""Where compiled code is named and built, and that other devices have nothing to do with it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.package import PACKAGE, modules
from verl.kernels.build import library


def test_ctypes_and_compilers_are_named_by_the_kernels_and_the_sandbox_and_three_more() -> None:
    named = re.compile(r"\bctypes\b|\bCDLL\b|\bg\+\+|clang|\bcpp_extension\b|\bcffi\b")
    files = {place for place, (text, _) in modules().items() if named.search(text)}
    # Of a signal's handler in C, of a process's parent, and of C's heap, Python says nothing.
    of_the_system = {"_host/ray_session.py", "rewards/processes.py", "_host/device.py"}
    assert {place.partition("/")[0] for place in files - of_the_system} == {"kernels", "sandbox"}
    assert {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.cpp")} == {"kernels"}


def test_for_another_device_nothing_is_imported_or_compiled() -> None:
    """A model in memory of another kind: a forward with its backward, generation, and an optimizer step."""
    done = forked.run([sys.executable, "-c", OTHER_DEVICE])
    assert done.returncode == 0, done.stderr


OTHER_DEVICE = """
import sys
for name in [name for name in sys.modules if name.startswith("verl.")]:
    del sys.modules[name]
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import verl.kernels.compiled as compiled
from verl.models.log_probs import token_log_probs
from verl.models.memory import ModelSize
from verl.rollout.embedded.attention import BatchTensors, PagedAttention
from verl.rollout.embedded.kv_cache import KVCache
from verl.rollout.embedded.scheduler import ScheduledBatch
import verl.rollout.embedded.engine
from verl.training.adamw import SplitAdamW
from verl.training.gradients import Weight
from verl.training.options import OptimConfig

meta = torch.device("meta")
sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, vocab_size=64)
with meta:
    model = LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16()
    ModelSize.from_model(model)
    hidden = torch.empty(4, 32, dtype=torch.bfloat16, requires_grad=True)
    log_probs, _ = token_log_probs(hidden, model.lm_head.weight, torch.zeros(4, dtype=torch.int64))
    log_probs.sum().backward()
    live = torch.nn.Parameter(torch.empty(4, 16, dtype=torch.bfloat16))
    weight = Weight("w", live, live)
    weight.gradient, weight.has_gradient = torch.empty(4, 16), True
assert compiled.kernels(torch.bfloat16, meta) is None
SplitAdamW([weight], OptimConfig()).step(1e-3, 1.0)
plan = ScheduledBatch()
plan.add([5, 6], 0, [0], 1)
attention = PagedAttention(KVCache(2, 1, 1, 32, torch.bfloat16, meta), BatchTensors.of(plan, meta))
assert attention.cache.keys[0].shape == (3, 32, 1, 32)  # with the spare block
assert "verl.kernels.build" not in sys.modules, "loaded"
"""


@pytest.mark.slow
@pytest.mark.skipif(library() is None, reason="no compiler here")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have other names")
@pytest.mark.parametrize("processor", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_kernels_for_lesser_processors_compute_the_same(processor: str, tmp_path: Path) -> None:
    # Vectors of 16, 32 and 64 bytes, without products of bf16: as far as this machine has them.
    needed = {"x86-64-v2": "sse4_2", "x86-64-v3": "avx2", "x86-64-v4": "avx512vl"}[processor]
    if needed not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"no {needed} here")
    script = (
        "import sys, pytest, torch\n"  # torch has the OpenMP library
        "from verl.kernels import build\n"
        f"assert '-march={processor}' in build._FLAGS and build.library() is not None\n"
        "names = ['models/test_llama', 'models/test_attention', 'kernels/test_kernels']\n"
        "files = [f'tests/{name}.py' for name in names]\n"
        "sys.exit(pytest.main(['-qx', '-m', 'not slow', '-p', 'no:cacheprovider', *files]))\n"
    )
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "VERL_KERNELS_MARCH": processor}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=env,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
