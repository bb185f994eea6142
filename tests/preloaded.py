"""What the server of `tests/forked.py` imports before it forks: what commands, trainers and models would import."""

from __future__ import annotations

import contextlib
import gc
import io
from collections.abc import Sequence

import pyarrow.dataset
import pytest
import reasoning_gym
import rich.live
import rich.progress
import torch
from torch.utils.tensorboard import SummaryWriter
from transformers import GPT2LMHeadModel, LlamaForCausalLM, Qwen2ForCausalLM  # loaded by name when first asked for

import tests.algorithms.support
import tests.conftest
import tests.forked
import tests.training.cases
import verl
import verl.algorithms
import verl.cli.main
import verl.kernels
import verl.roles
import verl.rollout.embedded.engine
import verl.run.train
import verl.training.torch_engine
import verl.workers.actor

torch.set_num_threads(tests.conftest.THREADS)
tests.forked.warm_ray()


class _NoItems:
    """Of pytest: a module has no tests."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self) -> list[pytest.Item]:
        return []


def load(arguments: Sequence[str]) -> None:
    """Import the modules of the tests that `arguments` of pytest name, as pytest imports them, which takes those that
    are there already. What cannot be imported is reported by the processes that run the tests."""
    if arguments:
        options = ["--capture=no", "--collect-only", "-p", "no:cacheprovider"]
        with contextlib.redirect_stdout(io.StringIO()):
            pytest.main([*options, *arguments], [_NoItems()])
    gc.freeze()  # in no forked process does the collector walk through what is here


__all__ = [
    "GPT2LMHeadModel", "LlamaForCausalLM", "Qwen2ForCausalLM", "SummaryWriter", "load", "pyarrow", "reasoning_gym",
    "rich", "tests", "verl",
]  # fmt: skip
