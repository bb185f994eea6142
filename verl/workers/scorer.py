"""A reward worker: calls one function, one call after the other, in a process that may hang, crash or be killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from verl._base.durable import digest
from verl._host.user_functions import load_function, split_spec
from verl.errors import RewardError
from verl.rewards import generators
from verl.rewards.scores import Call, Score, call_plain
from verl.workers.pooled import PooledWorker


class Scorer(PooledWorker):
    """Calls run in the main thread, so that a function may use signals."""

    def load(self, function: bytes, spec: str, content: str) -> None:
        """Get ready to call a function.

        Args:
            function: it, pickled by Ray's cloudpickle; or
            spec: "FILE.py:FUNCTION", and `content`, the digest of the file as the driver has it.

        Raises:
            RewardError: the file has changed since, or cannot be imported.
        """
        import ray

        if spec and digest(split_spec(spec)[0]) != content:
            raise RewardError(
                f"{split_spec(spec)[0]} is not what it was when this run began, or not what the driver's machine has, "
                "and one run has one reward: put it back, or start again to go on with the new one"
            )
        generators.keeps_states = False
        self.function: Callable[..., Any] = load_function(spec) if spec else ray.cloudpickle.loads(function)
        if hasattr(self.function, "load"):
            self.function.load()
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)

    def ping(self) -> None:
        """Answers, if the process is alive."""

    def score(self, call: Call) -> tuple[list[Score], float]:
        """The scores of a call, and the seconds that it took."""
        began = time.perf_counter()
        scores = call_plain(self.function, call, self.loop)
        return scores, time.perf_counter() - began
