"""A rollout engine that waits: each batch of at most `max_num_seqs` responses takes `SECONDS`."""

from __future__ import annotations

import os
import time
from typing import Any

from verl.rollout.embedded.engine import EmbeddedEngine


class SlowEngine(EmbeddedEngine):
    def __init__(self, packed: Any, tokenizer: Any, eos: Any, options: Any) -> None:
        super().__init__(
            packed, eos_token_ids=eos, seed=options.seed, tokenizer=tokenizer, max_batch=options.max_num_seqs
        )

    def step(self) -> Any:
        time.sleep(float(os.environ["SLOW_ENGINE_SECONDS"]))
        return super().step()
