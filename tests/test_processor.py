"""Which processor the tests ran as: CI holds them, in turns, to instruction sets of older ones and to more threads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from verl.kernels import build

#: A convolution is oneDNN's, which then says what it takes the processor for.
CONVOLUTION = "import torch; torch.nn.functional.conv2d(torch.ones(8, 64, 32, 32), torch.ones(64, 64, 3, 3))"


def test_the_processor_is_the_one_that_was_asked_for(record_property: Callable[[str, object], None]) -> None:
    threads, capability = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    record_property("torch", f"{threads} threads, {capability}, kernels {' '.join(build._FLAGS)}")
    assert threads == int(os.environ["OMP_NUM_THREADS"])
    assert f"-march={os.environ.get('VERL_KERNELS_MARCH', 'native')}" in build._FLAGS
    if wanted := os.environ.get("ATEN_CPU_CAPABILITY"):
        assert capability == wanted.upper()


@pytest.mark.skipif(sys.platform != "linux", reason="builds for other systems may lack oneDNN")
def test_onednn_is_held_to_what_was_asked_for(record_property: Callable[[str, object], None]) -> None:
    env = {**os.environ, "ONEDNN_VERBOSE": "1"}
    done = subprocess.run([sys.executable, "-c", CONVOLUTION], env=env, capture_output=True, text=True, timeout=60)
    said = re.search(r"cpu,isa:(.*)", done.stdout)
    if said is None:
        pytest.skip("this torch has no oneDNN")
    record_property("oneDNN", said[1])
    if wanted := os.environ.get("ONEDNN_MAX_CPU_ISA"):
        assert re.sub(r"\W|Intel", "", said[1]).startswith(wanted.partition("_")[0])
