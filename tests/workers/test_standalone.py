"""The worker's side of asynchronous training, without its process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import verl
from tests.conftest import CHAT, byte_tokenizer
from verl.workers.channel import Message
from verl.workers.standalone import StandaloneWorker, describe


def test_a_worker_has_the_tokenizer_with_all_its_templates_and_files(tiny: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": CHAT, "tool_use": f"{CHAT}Tools."}  # type: ignore[assignment]
    save = tokenizer.save_pretrained

    def save_with_bytes(folder: str, **options: Any) -> Any:
        Path(folder, "pieces.model").write_bytes(b"\xff\x00")
        return save(folder, **options)

    tokenizer.save_pretrained = save_with_bytes  # type: ignore[method-assign]
    head, data = describe(verl.Actor(str(tiny), tokenizer))
    worker = StandaloneWorker(lambda *_, **__: None)
    worker.on_model(Message("model", json.loads(json.dumps(head)), data))
    assert worker.engine.tokenizer.chat_template == tokenizer.chat_template  # type: ignore[union-attr]
