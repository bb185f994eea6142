"""Libraries keep a bounded amount of memory for the shapes of products."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ENV
from verl._host.device import _PRODUCT_CACHES

GROWTH = """
import sys
from pathlib import Path
from verl._host.device import limit_library_memory

if sys.argv[1] == "limited":
    limit_library_memory()
import torch
from transformers import AutoModelForCausalLM
from tests.conftest import config_of
from verl.models.packed import PackedModel

if sys.argv[1] == "model":
    PackedModel(AutoModelForCausalLM.from_config(config_of("llama"), dtype=torch.bfloat16))

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

def multiply(counts):
    for rows in counts:
        x = torch.ones(rows, 64, dtype=torch.bfloat16)
        torch.nn.functional.linear(x, weight), x @ weight, x.t() @ x

torch.set_num_threads(1)
weight = torch.ones(64, 64, dtype=torch.bfloat16)
multiply([600])
before = resident()
multiply(range(16, 516))
print(resident() - before)
"""


@pytest.mark.slow  # 1,500 shapes, three times from cold
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_memory_for_shapes_of_products_is_bounded() -> None:
    env = {name: value for name, value in ENV.items() if name not in _PRODUCT_CACHES}

    def growth(kind: str) -> float:
        done = subprocess.run(
            [sys.executable, "-c", GROWTH, kind], capture_output=True, text=True, timeout=300, env=env
        )
        assert done.returncode == 0, done.stderr
        return float(done.stdout)

    free = growth("free")
    if free < 40:
        pytest.skip(f"the products of this build keep little ({free:.0f} MB)")
    assert growth("limited") < 0.6 * free
    assert growth("model") < 0.6 * free  # a script that makes a model
