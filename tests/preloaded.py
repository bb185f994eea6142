"""What the server of `tests/ranks.py` imports before it forks ranks."""

from __future__ import annotations

import torch

import tests.conftest
import verl
import verl.cli.main
import verl.training.torch_engine
import verl.workers.actor

torch.set_num_threads(1)
# Loaded by name when they are first asked for: the models that tests are made of.
from transformers import GPT2LMHeadModel, LlamaForCausalLM, Qwen2ForCausalLM  # noqa: E402

__all__ = ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen2ForCausalLM", "tests", "verl"]
