"""The worker's side of asynchronous training, without its process."""

from __future__ import annotations

import pickle
from pathlib import Path

import verl
from tests.conftest import CHAT, byte_tokenizer
from verl.workers.standalone import EngineRecipe


def test_an_engine_made_elsewhere_has_the_tokenizer_with_all_its_templates(tiny: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": CHAT, "tool_use": f"{CHAT}Tools."}  # type: ignore[assignment]
    recipe = EngineRecipe.of(verl.Actor(str(tiny), tokenizer))
    engine = pickle.loads(pickle.dumps(recipe)).make()
    assert engine.tokenizer.chat_template == tokenizer.chat_template
    assert engine.tokenizer("Tools.")["input_ids"] == tokenizer("Tools.")["input_ids"]
