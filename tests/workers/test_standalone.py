"""The worker's side of asynchronous training, without its process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import verl
from tests.conftest import CHAT, byte_tokenizer
from verl.roles.columns import expand
from verl.workers.standalone import EngineRecipe, StandaloneWorker


def test_an_engine_made_elsewhere_has_the_tokenizer_with_all_its_templates(tiny: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": CHAT, "tool_use": f"{CHAT}Tools."}  # type: ignore[assignment]
    recipe = EngineRecipe.of(verl.Actor(str(tiny), tokenizer))
    engine = pickle.loads(pickle.dumps(recipe)).make()
    made = engine._responses.tokenizer
    assert made.chat_template == tokenizer.chat_template
    assert made("Tools.")["input_ids"] == tokenizer("Tools.")["input_ids"]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_log_probs_stay_in_the_models_precision(make_tiny: Callable[..., Path], dtype: str) -> None:
    actor = verl.Actor(str(make_tiny("gpt2")), dtype=dtype)
    worker = StandaloneWorker()
    steps = worker.run(EngineRecipe.of(actor), 0)
    next(steps)
    worker.post(("g", expand(actor.prompts(["Once"]), 2), {"max_new_tokens": 4}))
    done = next(steps)
    assert done is not None and len(done.samples) == 2
    kept = {"float64": pa.float64(), "float32": pa.float32()}[dtype]
    assert done.samples.arrow("rollout_log_probs").type == pa.large_list(kept)
